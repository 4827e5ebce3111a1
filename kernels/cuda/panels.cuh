// Panels of 32-byte rows, which ldmatrix reads without bank conflicts: the two 16-byte halves change
// places in rows with bit 2 set, so that any eight neighbouring rows cover all 32 banks.
#pragma once

#include "types.cuh"

// Byte of (row, byte) in a panel of 32-byte rows.
__device__ __forceinline__ int panel_offset(int row, int byte) {
  return row * 32 + (byte ^ ((row & 4) << 2));
}

// What lane `lane` adds to the address of 16 rows of a panel for ldmatrix_x4, which then gives
// b0, b1 of rows 0..7 in r[0], r[1] and of rows 8..15 in r[2], r[3].
__device__ __forceinline__ int ldmatrix_offset(int lane) {
  return panel_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 16);
}
