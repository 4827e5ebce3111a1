#pragma once
typedef unsigned long long u64;
