// Products with tiles of threadgroup memory, in the simulator: as on Metal, rows lie one after the
// other.
#pragma once

#define TILE_ROWS 32
#define TILE_SIMDS 4
// As on Metal, unless the source of a kernel asks for producers.
#ifndef TILE_PRODUCERS
#define TILE_PRODUCERS 0
#endif
#define TILE_BUFFERS (TILE_PRODUCERS > 0 ? 2 : 1)

namespace metal {

#define MSL_SITE vqkv::sim::Site site = vqkv::sim::Site::here()

template <int D>
inline int tile_chunk(int row, int chunk) {
  return row * (D / 8) + chunk;
}
template <typename T>
inline vec<T, 2> matrix_rounded(float x, float y) {
  return vec<T, 2>(T(x), T(y));
}
inline void tile_barrier(MSL_SITE) {
  vqkv::sim::barrier(vqkv::sim::kThreadgroupMemory, "tile_barrier", site);
}

// As on CUDA the gate itself is reached by several threads at once.
struct TileGate {
  unsigned short needed, arrived;
  unsigned rounds;
};
__attribute__((no_sanitize_thread)) inline void gate_start(TileGate* g, int simds) {
  g->needed = static_cast<unsigned short>(simds);
  g->arrived = 0;
  g->rounds = 0;
}
__attribute__((no_sanitize_thread)) inline bool gate_open(const void* gate, unsigned round) {
  return (static_cast<const TileGate*>(gate)->rounds & 1) != round;
}
inline void gate_wait(const TileGate* g, uint round, MSL_SITE) {
  vqkv::sim::gate(gate_open, g, round, "gate_wait", site);
}
__attribute__((no_sanitize_thread)) inline void gate_read(TileGate* g, MSL_SITE) {
  vqkv::sim::arrive(g, "gate_read", site);
  if (vqkv::sim::lane() == 0 && ++g->arrived == g->needed) {
    g->arrived = 0;
    g->rounds++;
  }
}
inline void gate_written(TileGate* g, MSL_SITE) {
  gate_read(g, site);
}
inline void producer_registers() {}
inline void consumer_registers() {}

// Columns [0, 16) of the rows of the left matrices that this lane has sums of.
template <typename T>
inline void left_rows(float (*left)[16], const vec<T, 2>* a, const char* name,
                      vqkv::sim::Site site) {
  const vqkv::sim::Exchange& e = vqkv::sim::exchange(a, 4 * sizeof(*a), name, site);
  for (uint i = 0; i < 2; i++) {
    for (uint k = 0; k < 16; k++) {
      vec<T, 2> pair;
      memcpy(static_cast<void*>(&pair),
             e.posted[matrix_lane(matrix_row(vqkv::sim::lane()), k % 8)] +
                 (2 * i + k / 8) * sizeof(pair),
             sizeof(pair));
      left[i][k] = float(pair[k & 1]);
    }
  }
}
template <int D>
inline int tile_query(int row, int d) {
  return row * D + d;
}
template <typename T, int D>
struct TileQueries {
  vec<T, 2> left[D / 4];
};
template <typename T, int D>
inline void tile_queries(TileQueries<T, D>& a, const T* queries, uint sg, uint lane) {
  const uint row = matrix_row(lane), column = matrix_column(lane);
  for (int i = 0; i < D / 4; i++) {
    const T* at = queries + (16 * sg + row + i / 2 % 2 * 8) * D + i / 4 * 16 + i % 2 * 8 + column;
    a.left[i] = vec<T, 2>(at[0], at[1]);
  }
}
template <typename T, int D>
inline void tile_scores(vec<float, 2>* c, const TileQueries<T, D>& a, const T* tile, MSL_SITE) {
  const uint column = matrix_column(vqkv::sim::lane());
  for (int i = 0; i < TILE_ROWS / 4; i++)
    c[i] = vec<float, 2>(0.0f);
  for (int k = 0; k < D / 16; k++) {
    float left[2][16];
    left_rows(left, a.left + 4 * k, "tile_scores", site);
    for (int n = 0; n < TILE_ROWS / 8; n++) {
      for (int j = 0; j < 2; j++) {
        const T* row = tile + (8 * n + column + j) * D + 16 * k;
        for (int x = 0; x < 16; x++) {
          for (int i = 0; i < 2; i++)
            c[2 * n + i][j] = fma(left[i][x], float(row[x]), c[2 * n + i][j]);
        }
      }
    }
  }
}
template <typename T, int D>
inline void tile_outputs(vec<float, 2>* c, const vec<T, 2>* a, const T* tile, MSL_SITE) {
  const uint column = matrix_column(vqkv::sim::lane());
  for (int k = 0; k < TILE_ROWS / 16; k++) {
    float left[2][16];
    left_rows(left, a + 4 * k, "tile_outputs", site);
    for (int x = 0; x < 16; x++) {
      const T* row = tile + (16 * k + x) * D + column;
      for (int n = 0; n < D / 8; n++) {
        for (int j = 0; j < 2; j++) {
          for (int i = 0; i < 2; i++)
            c[2 * n + i][j] = fma(left[i][x], float(row[8 * n + j]), c[2 * n + i][j]);
        }
      }
    }
  }
}
template <int N, int LATER>
inline void tile_wait(vec<float, 2>*) {}
template <int N, int LATER>
inline void tile_wait(vec<float, 2>*, float) {}
#undef MSL_SITE

}  // namespace metal

using metal::consumer_registers;
using metal::gate_read;
using metal::gate_start;
using metal::gate_wait;
using metal::gate_written;
using metal::matrix_rounded;
using metal::producer_registers;
using metal::tile_barrier;
using metal::tile_chunk;
using metal::tile_outputs;
using metal::tile_queries;
using metal::tile_query;
using metal::tile_scores;
using metal::tile_wait;
using metal::TileGate;
using metal::TileQueries;
