// Parameter blocks shared by kernels (MSL) and host code (C++). `long` is 64 bits in all of them.
#pragma once

// Vectors of one quantize_vq / dequantize_vq call, laid out [outer, heads, seq, groups] (x has
// `dims` values for each, codes one number). Codebook: [heads or 1, groups or 1, rows, dims].
struct VqParams {
  long outer;
  long heads;
  long seq;
  int groups;
  int dims;
  int rows;
  int per_head;      // 1: a codebook for each head
  int per_group;     // 1: a codebook for each group of the head dimension
  int threadgroups;  // along the first axis
};

// How the codes of one token are read: a bit stream of `bytes` bytes; entry t is the `window` bits
// at bit offset stride * t and selects a table row of `dims` values. Tables: [heads or 1, groups or
// 1, rows, dims].
struct CodeParams {
  int bytes;
  int window;
  int stride;
  int dims;
  int entries;  // per token; the code basis has entries * dims channels
  int rows;     // 2^window
  int per_head;
  int per_group;
  int scaled;   // 1: one bf16 scale per token
  int centred;  // 1: int8 centre per block and channel, with one bf16 scale per block
};

enum AttentionMask { MASK_NONE, MASK_BOOL, MASK_FLOAT, MASK_HALF, MASK_BFLOAT };

// A linear change of basis done inside a kernel: x -> (diagonal * x) H for queries of the key
// codes, y -> diagonal * (y H^T) for what the value codes give. H is the orthonormal Hadamard
// matrix.
struct BasisParams {
  int order;     // M of D = 2^k M; 0: none
  int per_head;  // 1: a diagonal for each kv head
  float scale;   // 1 / sqrt(D)
};

// Slices of the grid of one attention call, body and tail together.
#define ATTENTION_MAX_SLICES 512

struct AttentionParams {
  CodeParams key;
  CodeParams pair;  // a second key code; its channels follow those of the first; entries 0: none
  CodeParams value;
  BasisParams key_basis;
  BasisParams value_basis;
  long mask_strides[4];  // in values, 0 along axes of length 1
  int batch;
  int heads;  // query heads
  int kv_heads;
  int queries;  // query tokens L
  int key_dim;
  int value_dim;
  int body;         // tokens the code arrays have room for, S
  int tail;         // tokens the tail arrays have room for, T
  int sink_tokens;  // s
  int window;       // w
  int block;        // B
  int causal;
  int mask;          // AttentionMask
  int mask_columns;  // logical positions the mask knows, later ones are hidden; 1: it is for all
  int sinks;         // 1: a logit per query head takes part in the softmax, without a value
  int splits;        // parts of the body, each a slice of the grid
  int tail_splits;   // parts of the tail, further slices
  int uniform;       // 1: the layout of every row is `counts`
  int counts[3];     // tokens, coded tokens, position of the first recent tail token
  int separate;      // 1: what codes and tail gave go to outputs of their own
  float scale;       // softmax scale times log2(e)
};

// Rows of n entries of `bits` bits, `bytes` bytes packed. Rows that fill their bytes follow each
// other without gaps, so the host passes them as one.
struct ScalarParams {
  long rows;
  long n;
  long bytes;
  int bits;
  int wide;  // 1: one row of at most 4 bits per entry, read and written 16 entries at a time
};

// Vectors [rows, dims] and a sketch [channels, dims].
struct QjlParams {
  long rows;
  int dims;
  int channels;
};

// For each key head, `rows` query rows (its heads times the query tokens) and `tokens` coded keys.
struct QjlScoresParams {
  long heads;
  int rows;
  int tokens;
  int channels;
  float unit;  // sqrt(pi / 2) / channels
};

// dtype of the vectors of the Hadamard kernels, and how the scale of a row is chosen.
enum HadamardType { HADAMARD_FLOAT, HADAMARD_HALF, HADAMARD_BFLOAT };
enum HadamardScale { HADAMARD_MSE, HADAMARD_NORM, HADAMARD_UNBIASED, HADAMARD_MATCHED };

// Rows [rows, D], `seq` in turn of the same head of signs [heads, D].
struct HadamardParams {
  long rows;
  long seq;
  int heads;
  int dtype;      // HadamardType
  int out_dtype;  // HadamardType
  int inverse;
  float scale;  // 1 / sqrt(D)
};

struct HadamardQuantizeParams {
  long rows;
  long seq;    // rows of a sequence: those of one head, and of one centre if `frozen`
  int heads;   // of the signs
  int dtype;   // HadamardType
  int bits;    // 1, 2, 3, 4 or 8
  int bytes;   // per row, packed
  int kind;    // HadamardScale
  int block;   // rows that share a centre which is computed, or 0
  int frozen;  // 1: the centre of every sequence is given
  int wide;    // 1: rows of x, signs and centres begin on multiples of 16 bytes, if D is one of 32
  // The rows are multiplied by scale, 1 / sqrt(D), as centres are subtracted; without centres scale
  // is 1, and unit, otherwise 1, makes up for it.
  float scale;
  float unit;
  float root;   // sqrt(D)
  float share;  // 1 / block
  int levels;   // 2^bits: a factor that compilers do not take for a shift
  // without blocks: tiles of rows, and the threadgroups that share them
  int tiles;
  int groups;
};

// Rows [rows, width] to trellis codes of `bytes` bytes each.
struct TrellisParams {
  long rows;
  int width;
  int bits;
  int bytes;
  int kind;        // HadamardScale
  int simdgroups;  // of a threadgroup, each with one row
  float root;      // sqrt(width)
};
