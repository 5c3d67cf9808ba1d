// The fp32 product of small row-major tiles that both kernels are made of:
//   C[M,N] = A[M,K] B[K,N]   or   C += A B.
// A is read by broadcast through any strides (so A and A^T cost the same), B and C by rows.
#pragma once

#include "core/simd.h"

namespace chunkdelta::CHUNKDELTA_ISA {

// Rows and vectors of C that one register block holds. GFLOP/s of one core for 64 x 512 x 256 (gcc
// 12.2, Zen 4, where OpenBLAS reaches 95-100 on 1024^3): larger blocks lose because the compiler
// spills their row pointers and accumulators.
//   avx512   8x2 113 | 8x3 85 | 12x2 77 | 6x4 90 | 5x5 90
//   avx2     4x2  98 | 4x3 49 | 6x2 46
#if defined(CHUNKDELTA_ISA_avx512)
constexpr int GEMM_ROWS = 8, GEMM_VECTORS = 2;
#elif defined(CHUNKDELTA_ISA_avx2)
constexpr int GEMM_ROWS = 4, GEMM_VECTORS = 2;
#elif defined(__aarch64__)
constexpr int GEMM_ROWS = 8, GEMM_VECTORS = 2;
#else
constexpr int GEMM_ROWS = 4, GEMM_VECTORS = 2;
#endif

struct Matrix {  // a strided view; element (i, j) at data[i * row + j * column]
  const float* data;
  ptrdiff_t row, column;
};

template <int ROWS, int VECTORS>
static inline void gemm_block(int K, Matrix a, const float* b, ptrdiff_t ldb, float* c,
                              ptrdiff_t ldc, bool accumulate) {
  vf acc[ROWS][VECTORS];
  CHUNKDELTA_UNROLL for (int i = 0; i < ROWS; i++) {
    CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) {
      acc[i][j] = accumulate ? load(c + i * ldc + j * W) : vf{};
    }
  }
  const float* ak = a.data;
  for (int k = 0; k < K; k++, ak += a.column, b += ldb) {
    vf bk[VECTORS];
    CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) bk[j] = load(b + j * W);
    CHUNKDELTA_UNROLL for (int i = 0; i < ROWS; i++) {
      const vf x = splat(ak[i * a.row]);
      CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) acc[i][j] = x * bk[j] + acc[i][j];
    }
  }
  CHUNKDELTA_UNROLL for (int i = 0; i < ROWS; i++) {
    CHUNKDELTA_UNROLL for (int j = 0; j < VECTORS; j++) store(c + i * ldc + j * W, acc[i][j]);
  }
}

// Columns of a last, partial vector.
static inline void gemm_edge(int M, int n, int K, Matrix a, const float* b, ptrdiff_t ldb, float* c,
                             ptrdiff_t ldc, bool accumulate) {
  for (int i = 0; i < M; i++) {
    vf acc = accumulate ? load_first(c + i * ldc, n) : vf{};
    for (int k = 0; k < K; k++) {
      acc = splat(a.data[i * a.row + k * a.column]) * load_first(b + k * ldb, n) + acc;
    }
    store_first(c + i * ldc, acc, n);
  }
}

template <int VECTORS>
static inline void gemm_columns(int M, int K, Matrix a, const float* b, ptrdiff_t ldb, float* c,
                                ptrdiff_t ldc, bool accumulate) {
  int i = 0;
  const auto at = [&](int row) { return Matrix{a.data + row * a.row, a.row, a.column}; };
  for (; i + GEMM_ROWS <= M; i += GEMM_ROWS) {
    gemm_block<GEMM_ROWS, VECTORS>(K, at(i), b, ldb, c + i * ldc, ldc, accumulate);
  }
  for (; i + 4 <= M; i += 4) {
    gemm_block<4, VECTORS>(K, at(i), b, ldb, c + i * ldc, ldc, accumulate);
  }
  for (; i < M; i++) {
    gemm_block<1, VECTORS>(K, at(i), b, ldb, c + i * ldc, ldc, accumulate);
  }
}

static inline void gemm(int M, int N, int K, Matrix a, const float* b, ptrdiff_t ldb, float* c,
                        ptrdiff_t ldc, bool accumulate) {
  int j = 0;
  for (; j + GEMM_VECTORS * W <= N; j += GEMM_VECTORS * W) {
    gemm_columns<GEMM_VECTORS>(M, K, a, b + j, ldb, c + j, ldc, accumulate);
  }
  for (; j + W <= N; j += W) gemm_columns<1>(M, K, a, b + j, ldb, c + j, ldc, accumulate);
  if (j < N) gemm_edge(M, N - j, K, a, b + j, ldb, c + j, ldc, accumulate);
}

}  // namespace chunkdelta::CHUNKDELTA_ISA
