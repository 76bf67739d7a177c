// The only header a kernel includes besides params.h and other kernel headers. On Metal it is the
// standard library plus three macros; elsewhere it selects a mapping of Metal Shading Language to
// C++: type checking by clang (MSL_CHECK), CUDA, or the host simulator.
//
//   threadgroup_array(T, name, n);            threadgroup memory, in the body of a kernel
//   program_constant(T, name, n) = {...};     a table of scalars at program scope
//   instantiate_kernel(name, func, args...)   the kernel template func<args...>, under a name
//   instantiate_kernel_groups(name, threads, groups, func, args...)   the same, to be compiled so
//     that a core holds `groups` threadgroups, where the compiler can be told
//   threadgroups_in_grid(n)                   along its first axis, of which the host wants n: on
//     CUDA there may be fewer (Launch::cuda_resident)
//   UNROLL                                    the loop that follows, where that makes it faster
//   threadgroup_bytes(name, n);               n bytes, as for an array: on CUDA may be many, which
//     the host asks for (Launch::cuda_shared_bytes)
//   threadgroup_tables(name);                 256 rows of TABLE_ROW_BYTES bytes likewise
//   table_row(word, i, at)                    the offset of row `byte i of word` of them, plus `at`
//   word_at(low, high, bit)                   the word that begins at bit `bit` < 32 of two
//
// Matrices of 8 x 8 of a simdgroup: a lane holds the elements (matrix_row(lane),
// matrix_column(lane)) and the next one of that row as a pair, half2, bfloat2 or float2;
// matrix_lane(row, column) is that lane.
//   matrix_right(b)                what stands on the right of a product, as the next takes it
//   matrix_right_paired(b, x, lane)   from x, element (row, column / 2): right matrices whose
//   element
//     (2 i + e, 2 c + e) is that of row 2 i (b[0]) or 2 i + 1 (b[1]) and column c; others are 0
//   matrix_from_row(x, row, lane)   what the lane of that row and the same column has
//   matrix_multiply_add(c, a, b)   c[i] += a[2 i] b[0] + a[2 i + 1] b[1] for i = 0, 1
//   matrix_right_transposed(b, lane)   the same of the transpose of what the lanes hold
//   matrix_sum_rows(x), matrix_max_rows(x)   over the lanes of equal column
//   matrix_sum_columns(x), matrix_max_columns(x)   over the lanes of equal row
//   matrix_rounded<T>(x, y)        a pair
// Where QUAD_MATRICES is 1, there are also such products with other places: lanes 4 i to 4 i + 3
// hold row i of left matrices and sums, two neighbours each, and column i of right matrices.
//   quad_multiply(c, a, b), quad_multiply_add(c, a, b)   c[i] (+)= a[2 i] b[0] + a[2 i + 1] b[1]
//
// Tiles of TILE_ROWS rows of D 16-bit values in threadgroup memory, at a multiple of 1024 bytes,
// stand on the right of the products of a threadgroup of TILE_SIMDS simdgroups, each with left
// matrices `a` of 16 rows: pair 4 k + 2 i + j is of rows 8 i and columns 16 k + 8 j. Sums `c`: pair
// 2 n + i is of rows 8 i and columns 8 n. Queries, left matrices of D columns, are read from where
// tile_query<D>(row, d) says; where TILE_PRODUCERS is not 0 they must stay there.
//   tile_queries<T, D>(a, q, sg, lane)   a TileQueries<T, D> of the queries q of a threadgroup
//   tile_chunk<D>(row, chunk)      where eight values of a row lie, counted in 16 bytes
//   tile_barrier()                 a threadgroup's barrier; tiles written before may be multiplied
//   tile_scores<T, D>(c, a, tile)  c = a tile^T, begun: until tile_wait<pairs, later>(c), where
//   tile_outputs<T, D>(c, a, tile) c += a tile    `later` products begun after it may go on,
//   nothing
//                                                 may touch c, or write to a and tile
//   tile_wait<pairs, later>(c, x)  the same, once x >= 0 is calculated: compilers may leave that
//                                  until after the wait. Where TILE_PRODUCERS is not 0
// There are TILE_BUFFERS tiles of a kind at a time. TILE_PRODUCERS more simdgroups, an even number,
// only write tiles, half of them those of one side; they and those that read them wait for each
// other at gates, each a TileGate in threadgroup memory:
//   gate_start(g, simds)   how many simdgroups pass it in a round; one thread, before a barrier
//   gate_written(g)        the simdgroup passes: what it wrote may be multiplied after the round
//   gate_read(g)           the simdgroup passes: it reads the tile no more
//   gate_wait(g, round)    until the last round that is over is `round`: 1 at first, then 0, 1, ...
//   producer_registers(), consumer_registers()   gives registers to simdgroups that multiply; once
//
// A kernel takes buffers, then `constant Params& p`, then always the same four built-ins:
//   uint3 tgid [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
//   uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]
//
// What all mappings share is a subset of MSL: every pointer and reference names its address space,
// functions are spelt metal::exp, vectors are built as float4(...) and swizzled only by .xy and
// .zw, math and simdgroup functions take no bfloat (convert to float), and simdgroup functions no
// 64-bit values. tools/check_address_spaces.py enforces it.
#pragma once

#if defined(__METAL_VERSION__)

#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

using namespace metal;

#define threadgroup_array(T, name, ...) threadgroup T name[__VA_ARGS__]
#define program_constant(T, name, ...) constant constexpr T name[__VA_ARGS__]
#define threadgroups_in_grid(n) (n)
#define TABLE_ROW_BYTES 64
#define threadgroup_bytes(name, n)                   \
  threadgroup_array(uint4, name##_memory, (n) / 16); \
  threadgroup uchar* name = (threadgroup uchar*)name##_memory
#define threadgroup_tables(name) threadgroup_bytes(name, 256 * TABLE_ROW_BYTES)
#define UNROLL _Pragma("clang loop unroll(full)")
#define instantiate_kernel_groups(name, threads, groups, ...) instantiate_kernel(name, __VA_ARGS__)
#define instantiate_kernel(name, func, ...) \
  template [[host_name(#name)]] [[kernel]] decltype(func<__VA_ARGS__>) func<__VA_ARGS__>;

#include "simdgroup_matrix.h"

#elif defined(MSL_CHECK)
#include "compat/check.h"
#elif defined(__CUDACC__)
#include "compat/cuda.h"
#else
#include "compat/sim.h"
#endif
