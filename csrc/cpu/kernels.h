// The table of CPU kernels. variant_*.cpp compile the same kernel headers for one instruction set
// each; kernels() picks a table once. Only plain types cross this border: an inline function or
// template of the standard library in a kernel header could be merged by the linker across
// variants and then run on a machine that lacks its instructions.
#pragma once

#include <stdint.h>

#include "metal_params.h"

namespace vqkv {

enum class Real { f32, f16, bf16 };

/** Vectors that share a codebook. */
struct QuantizeTile {
  const void* x;
  Real type;
  int64_t stride;  // values from one vector to the next
  int64_t count;
  const float* book;  // [rows, dims]
  int rows;
  int dims;
  void* codes;  // uint8, or uint16 for more than 256 rows
  int64_t code_stride;
  float* scratch;  // kQuantizeLanes * dims
};

constexpr int kQuantizeLanes = 64;

/** Keys or values of one kv head. */
struct Tokens {
  int width;
  const void* tail;  // [T, width]
  Real type;
  const CodeParams* code;
  const uint8_t* codes;      // [S, bytes]
  const uint8_t* codes_end;  // end of the whole array
  const float* table;        // [1 or entries, rows, dims]
  const uint16_t* scales;    // bf16 [S]
  const int8_t* centres;     // [blocks, width]
  const uint16_t* centre_scales;
  int block;
};

/** What a mask says of the tokens of one query row. */
struct MaskRow {
  const void* at;   // of token 0
  int64_t stride;   // values from one token to the next, 0 or 1
  int64_t columns;  // tokens from here on are hidden
  AttentionMask type;
};

/** Up to kRowGroups * lanes query rows that share a kv head; tokens [first, last) of them. */
struct AttentionTile {
  Tokens keys, values;
  Tokens pair;                // coded: a second key code, whose scores are added; width 0: none
  const float* pair_queries;  // as queries, for `pair`
  bool coded;                 // tokens are of the body, else of the tail
  int64_t first, last;
  int rows;
  int lanes;             // rows are padded to groups of 4, 8 or 16
  const float* queries;  // [groups, width, lanes], times the softmax scale
  const int* begin;      // [rows]: row r attends to the tokens in [begin, end)
  const int* end;
  const MaskRow* mask;  // [rows], or null
  float* max;           // [groups * lanes]: running maximum, sum and output, updated
  float* sum;
  float* out;      // [rows, out_stride(value width)]
  float* scratch;  // attention_scratch()
};

constexpr int kMaxLanes = 16;
constexpr int kRowGroups = 4;
constexpr int kSubTile = 64;            // tokens decoded at a time
constexpr int kSpanFloats = 4096;       // scores of a row group held at a time
constexpr int kLutFloats = 128 * 1024;  // largest table of query-row products
constexpr int kChunkDims = 64;          // channels decoded at a time

__attribute__((always_inline)) constexpr int64_t out_stride(int width) {
  return (width + 15) / 16 * 16 + 64;
}

/** Floats of scratch for a tile whose code rows have at most `dims` values. */
constexpr int64_t attention_scratch(int dims) {
  return kRowGroups * 2 * (kSpanFloats + 4 * kMaxLanes) +
         kSubTile * out_stride(dims > kChunkDims ? dims : kChunkDims) + kSubTile * kChunkDims / 2 +
         kLutFloats;
}

/** Part of a row of packed entries that begins at a whole byte. Indices are uint8, or uint16 for
 * more than 8 bits. */
struct ScalarTile {
  const void* in;
  void* out;
  int64_t count;  // entries
  int bits;
  Real type;          // of the values of quantize_scalar and dequantize_scalar
  const void* table;  // their float32 bounds [2^bits - 1] and centroids [2^bits] of this type
};

/** Vectors and a sketch in panels [dims, kQjlPanel]. Gives the products, or else signs and norms.
 */
struct QjlTile {
  const void* x;  // [count, dims]
  Real type;
  int count;  // at most kQjlRows
  int dims;
  int channels;
  const float* sketch;
  float* scratch;   // kQjlRows * dims
  uint8_t* signs;   // [count, channels / 8]
  uint16_t* norms;  // bf16 [count]
  float* products;  // [count, channels], or null
};

/** Query rows in the sketch's channels and sign codes of one key head. */
struct QjlScoresTile {
  const float* queries;  // [rows, channels]
  int rows;
  int channels;
  const uint8_t* signs;  // [count, channels / 8]
  const void* norms;     // [count]
  Real type;             // of the norms
  int count;
  float unit;
  float* out;  // [rows, out_stride]
  int64_t out_stride;
  float* scratch;  // kQjlPanel * channels
};

constexpr int kQjlPanel = 32;
constexpr int kQjlRows = 48;

/** Rows of the randomized Hadamard transform; width = n * order, n a power of two. */
struct HadamardTile {
  const void* x;
  Real type;
  int64_t count;
  int width;
  int order;           // 1, 12, 20 or 28
  const float* signs;  // [width]
  float scale;
  bool inverse;
  void* out;
  Real out_type;
  float* scratch;  // hadamard_scratch(width, 1)
};

/** Rows that share signs and centre: with `block` all rows of one block. */
struct HadamardQuantizeTile {
  HadamardTile rows;      // without its output
  const float* table;     // bounds [255], levels [256]
  const int8_t* centre;   // [width], or null
  uint16_t centre_scale;  // bf16
  uint8_t* packed;        // [count, bytes]
  uint16_t* scales;       // bf16 [count]
  int8_t* block_centre;   // [width]
  uint16_t* block_scale;  // bf16
  HadamardQuantizeParams p;
};

constexpr int kHadamardRows = 16;  // rows held in lanes side by side

/** Floats of scratch for groups of kHadamardRows rows that are held at the same time. */
constexpr int64_t hadamard_scratch(int width, int64_t groups) {
  return int64_t(width + 32) * (kHadamardRows * (groups + 1) + 1);
}

constexpr int kTrellisStates = 256;

/** Up to kHadamardRows rows to be coded. */
struct TrellisTile {
  const float* x;  // [count, width]
  int count;
  const float* table;  // [kTrellisStates]
  uint8_t* codes;      // [count, bytes]
  uint16_t* scales;    // bf16 [count]
  float* scratch;      // trellis_scratch(width)
  TrellisParams p;
};

/** Two tiles, costs of two steps, the choices of all steps (at most 128 bits each) and a path. */
constexpr int64_t trellis_scratch(int width) {
  return kHadamardRows * (int64_t(width) * (2 + 4 + 1) + 2 * kTrellisStates);
}

struct Kernels {
  const char* isa;
  void (*quantize)(const QuantizeTile&);
  void (*attention)(const AttentionTile&);
  void (*pack_bits)(const ScalarTile&);
  void (*unpack_bits)(const ScalarTile&);
  void (*quantize_scalar)(const ScalarTile&);
  void (*dequantize_scalar)(const ScalarTile&);
  void (*hadamard)(const HadamardTile&);
  void (*hadamard_quantize)(const HadamardQuantizeTile&);
  void (*qjl_products)(const QjlTile&);
  void (*qjl_scores)(const QjlScoresTile&);
  void (*trellis_encode)(const TrellisTile&);
};

const Kernels& kernels();

namespace baseline {
extern const Kernels table;
}
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}

}  // namespace vqkv
