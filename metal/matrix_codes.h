// Codes in registers, and the values they select from tables in threadgroup memory. See
// attention_matrix.h.
//
// Kernels are compiled for a CODE: the values that a byte stands for, or TRELLIS_CODE(bits), whose
// entries are windows of 8 bits, one every `bits` bits and for each value. The row of a token then
// has a byte more than the windows begin in, so rows lie at any address: a lane loads the aligned
// words around its codes and shifts them. A kernel of TRELLIS_ANY takes keys and values of two
// trellis codes, whose bits it reads from its parameters.
#pragma once

#include "prelude.h"

#define TRELLIS_CODE(bits) (-(bits))
#define TRELLIS_ANY 0

// The code of keys or of values: that of a kernel, or for TRELLIS_ANY the one of `bits` bits.
#define CODE_OF(CODE, bits) ((CODE) == TRELLIS_ANY ? TRELLIS_CODE(bits) : (CODE))
// A statement, for which SIDE_CODE is that code. All threads take the same branch.
#define FOR_SIDE_CODE(CODE, bits, ...)                \
  switch ((CODE) == TRELLIS_ANY ? (bits) : 4) {       \
    SIDE_CASE(case 1, CODE_OF(CODE, 1), __VA_ARGS__)  \
    SIDE_CASE(case 2, CODE_OF(CODE, 2), __VA_ARGS__)  \
    SIDE_CASE(case 3, CODE_OF(CODE, 3), __VA_ARGS__)  \
    SIDE_CASE(default, CODE_OF(CODE, 4), __VA_ARGS__) \
  }
#define SIDE_CASE(label, code, ...) \
  label:                            \
  {                                 \
    constexpr int SIDE_CODE = code; \
    __VA_ARGS__;                    \
    break;                          \
  }

// Values of a table row, and bytes of one in threadgroup memory: no two lanes share a word there.
#define CODE_DIMS(CODE) ((CODE) > 0 ? (CODE) : 1)
#define CODE_ENTRY(CODE) ((CODE) > 1 ? 2 * (CODE) : 4)

// Bytes in which the codes of CHANNELS values begin, and those of a token of D values.
#define CODE_BYTES(CODE, CHANNELS) \
  ((CODE) > 0 ? (CHANNELS) / CODE_DIMS(CODE) : (CHANNELS) * -(CODE) / 8)
#define CODE_ROW(CODE, D) (CODE_BYTES(CODE, D) + ((CODE) > 0 ? 0 : 1))
// Words that are loaded for them, and words they fill.
#define CODE_WORDS(CODE, CHANNELS) ((CODE_BYTES(CODE, CHANNELS) + ((CODE) > 0 ? 3 : 7)) / 4)
#define CODE_FILLED(CODE, CHANNELS) (CODE_BYTES(CODE, CHANNELS) / 4 + 1)
// Whether a lane's part of a token begins at any address, or as the token does.
#define CODE_SKEWED(CODE, CHANNELS) ((CODE) < 0 && CODE_BYTES(CODE, CHANNELS) % 4 != 0)

struct MatrixTable {
  threadgroup const uchar* rows;
  uint at;  // of the lane's copy in a row
};

// Rows of the tables of keys and values alternate in threadgroup memory. A table's half of a row
// repeats it, so that lanes rarely want the same bank.
#define CODE_COPIES(CODE) (TABLE_ROW_BYTES / (2 * CODE_ENTRY(CODE)))

// Puts the values of both tables into every copy of their rows.
template <int CODE, int THREADS>
METAL_FUNC void fill_tables(threadgroup uchar* rows, device const float* keys,
                            device const float* values, uint tid) {
  constexpr int DIMS = CODE_DIMS(CODE);
  constexpr int PARTS = TABLE_ROW_BYTES / 32;  // of 16 bytes, in a table's half of a row
  for (int i = int(tid); i < 512; i += THREADS) {
    device const float* from = (i < 256 ? keys : values) + i % 256 * DIMS;
    uint words[4];
    UNROLL
    for (int w = 0; w < 4; w++)
      words[w] = as_type<uint>(half2(half(from[2 * w % DIMS]), half(from[(2 * w + 1) % DIMS])));
    threadgroup uint4* to =
        (threadgroup uint4*)(rows + i % 256 * TABLE_ROW_BYTES) + i / 256 * PARTS;
    UNROLL
    for (int part = 0; part < PARTS; part++)
      to[(part + int(tid)) % PARTS] = uint4(words[0], words[1], words[2], words[3]);
  }
}

// N bytes from an address that is a multiple of N, or of 16.
template <int N>
METAL_FUNC void load_bytes(thread uint* words, device const uchar* at) {
  if (N >= 16) {
    UNROLL
    for (int i = 0; i < N / 16; i++) {
      const uint4 w = ((device const uint4*)at)[i];
      words[N >= 16 ? 4 * i : 0] = w.x;
      words[N >= 16 ? 4 * i + 1 : 0] = w.y;
      words[N >= 16 ? 4 * i + 2 : 0] = w.z;
      words[N >= 16 ? 4 * i + 3 : 0] = w.w;
    }
  } else if (N == 8) {
    const uint2 w = ((device const uint2*)at)[0];
    words[0] = w.x;
    words[N == 8 ? 1 : 0] = w.y;
  } else if (N == 4) {
    words[0] = ((device const uint*)at)[0];
  } else if (N == 2) {
    words[0] = ((device const ushort*)at)[0];
  } else {
    words[0] = at[0];
  }
}

// A lane takes a part of CHANNELS values of each of its tokens. The first of these is at a multiple
// of 4 bytes, and so is its part where all have whole words: code_part bytes after it.
template <int CODE, int CHANNELS>
METAL_FUNC int code_part(int part) {
  return CODE_SKEWED(CODE, CHANNELS) ? 0 : part * CODE_BYTES(CODE, CHANNELS);
}
// Bytes to the part from the word in which token `token` begins, counted after code_part.
template <int CODE, int CHANNELS, int D>
METAL_FUNC uint code_skew(int part, int token) {
  const uint begin = uint(CODE_SKEWED(CODE, CHANNELS) ? part * CODE_BYTES(CODE, CHANNELS) : 0);
  return begin + uint(token * CODE_ROW(CODE, D) % 4);
}
// The words around BYTES bytes and one more, which begin `skew` bytes after `from`.
template <int BYTES, int WORDS>
METAL_FUNC void load_words(thread uint* words, device const uint* from, uint skew) {
  UNROLL
  for (int i = 0; i < WORDS - 1; i++)
    words[i] = from[skew / 4 + uint(i)];
  // never a word that has nothing of them: that may lie outside the array
  words[WORDS - 1] = from[(skew + uint(BYTES)) / 4];
}
// `codes` points code_part bytes after the first token.
template <int CODE, int CHANNELS, int D>
METAL_FUNC void load_codes(thread uint* words, device const uchar* codes, int part, int token) {
  if (CODE > 0)
    load_bytes<CODE_BYTES(CODE, CHANNELS)>(words, codes + token * CODE_ROW(CODE, D));
  else
    load_words<CODE_BYTES(CODE, CHANNELS), CODE_WORDS(CODE, CHANNELS)>(
        words, (device const uint*)codes + token * CODE_ROW(CODE, D) / 4,
        code_skew<CODE, CHANNELS, D>(part, token));
}

// Word i of a lane's codes, which begin `skew` % 4 bytes into the words that were loaded.
template <int CODE, int CHANNELS>
METAL_FUNC uint code_word(thread const uint* words, int i, uint skew) {
  const uint by = skew % 4 * 8;
  return i + 1 < CODE_WORDS(CODE, CHANNELS)
             ? word_at(words[i], words[i + 1 < CODE_WORDS(CODE, CHANNELS) ? i + 1 : i], by)
             : words[i] >> by;
}
// Value i of those.
template <int CODE, int CHANNELS>
METAL_FUNC half trellis_value(thread const uint* words, MatrixTable t, int i, uint skew) {
  const int bit = i * (CODE < 0 ? -CODE : 8), at = bit / 32, by = bit % 8;
  uint word = code_word<CODE, CHANNELS>(words, at, skew);
  if (by != 0 && at + 1 < CODE_FILLED(CODE, CHANNELS))
    word = word_at(word, code_word<CODE, CHANNELS>(words, at + 1, skew), uint(by));
  else
    word >>= by;
  return *(threadgroup const half*)(t.rows + table_row(word, bit % 32 / 8, t.at));
}

// Values [4 i, 4 i + 4) of those whose codes are `words`.
template <int CODE, int CHANNELS>
METAL_FUNC half4 four_coded(thread const uint* words, MatrixTable t, int i, uint skew) {
  if (CODE < 0)
    return half4(trellis_value<CODE, CHANNELS>(words, t, 4 * i, skew),
                 trellis_value<CODE, CHANNELS>(words, t, 4 * i + 1, skew),
                 trellis_value<CODE, CHANNELS>(words, t, 4 * i + 2, skew),
                 trellis_value<CODE, CHANNELS>(words, t, 4 * i + 3, skew));
  if (CODE == 2)
    return half4(
        *(threadgroup const half2*)(t.rows + table_row(words[i / 2], 4 * i % 8 / 2, t.at)),
        *(threadgroup const half2*)(t.rows + table_row(words[i / 2], 4 * i % 8 / 2 + 1, t.at)));
  constexpr int FOURS = CODE >= 4 ? CODE / 4 : 1;
  const uint row = table_row(words[i / FOURS / 4], i / FOURS % 4, t.at);
  return *(threadgroup const half4*)(t.rows + row + 8 * (i % FOURS));
}
