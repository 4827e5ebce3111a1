// Partial sums over tokens: one layout for who writes and who joins them.
#pragma once

#include "live_keys.cuh"
#include "rows.cuh"

// Of one chunk of tokens of K or V of one (batch, key head): [3][HEAD_DIM] sums, minima, maxima,
// all times RANGE and the sums also over Nk, then the number of tokens that took part.
template <int HEAD_DIM>
constexpr int PARTIAL_FLOATS = 3 * HEAD_DIM + 4;
