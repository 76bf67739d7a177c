#include "attention/op.h"

#include <bit>

#include "attention/primitive.h"
#include "contiguous.h"
#include "hadamard/op.h"
#include "mlx/ops.h"

namespace vqkv {
namespace {

constexpr const char* kOp = "attention";
constexpr int kMaxChannels = 576;  // what the widest kernel holds

// Checks one side (keys or values) of `width` channels against the tail that goes with it.
void check_coded(const char* side, const Coded& c, int width, const mx::array& tail,
                 const Span& span) {
  const auto& cs = c.codes.shape();
  require(c.codes.dtype() == mx::uint8 && c.codes.ndim() == 4, kOp, side,
          " codes must be uint8 of shape [B, Hkv, S, bytes], but got ", c.codes.dtype(), " ", cs,
          ".");
  require(cs[0] == tail.shape(0) && cs[1] == tail.shape(1), kOp, side,
          " codes must have the batch and heads of the tail, ", tail.shape(0), " and ",
          tail.shape(1), ", but got shape ", cs, ".");
  const auto& ts = c.table.shape();
  require(is_float(c.table.dtype()) && c.table.ndim() == 4, kOp, side,
          " table must be floating of shape [1 or Hkv, 1 or entries, 2^window, dims], but got ",
          c.table.dtype(), " ", ts, ".");
  const int rows = ts[2], dims = ts[3];
  require(dims >= 1 && width % dims == 0, kOp, side,
          " table must have rows of a length that divides ", width, ", but got ", dims, ".");
  require(rows >= 2 && rows <= 65536 && std::has_single_bit(unsigned(rows)), kOp, side,
          " table must have 2^window rows with window 1 to 16, but got ", rows, ".");
  const int entries = width / dims, window = std::countr_zero(unsigned(rows));
  require(ts[0] == 1 || ts[0] == cs[1], kOp, side, " table must be for 1 or ", cs[1],
          " heads, but got shape ", ts, ".");
  require(ts[1] == 1 || ts[1] == entries, kOp, side, " table must be for 1 or ", entries,
          " entries, but got shape ", ts, ".");
  require(c.stride >= 1 && c.stride <= window, kOp, side, " stride must be 1 to ", window,
          " bits, but got ", c.stride, ".");
  const int bytes = ((entries - 1) * c.stride + window + 7) / 8;
  require(cs[3] == bytes, kOp, side, " codes must have ", bytes, " bytes per token for ", entries,
          " entries of ", window, " bits at stride ", c.stride, ", but got ", cs[3], ".");
  if (c.scales) {
    const mx::Shape want{cs[0], cs[1], cs[2]};
    require(c.scales->dtype() == mx::bfloat16 && c.scales->shape() == want, kOp, side,
            " scales must be bfloat16 of shape ", want, ", but got ", c.scales->dtype(), " ",
            c.scales->shape(), ".");
  }
  require(c.centres.has_value() == c.centre_scales.has_value(), kOp, side,
          " centres and centre scales must come together.");
  if (c.centres) {
    const int blocks = (cs[2] + span.block - 1) / span.block;
    const mx::Shape want{cs[0], cs[1], blocks, width}, want_scale{cs[0], cs[1], blocks};
    require(c.centres->dtype() == mx::int8 && c.centres->shape() == want, kOp, side,
            " centres must be int8 of shape ", want, ", but got ", c.centres->dtype(), " ",
            c.centres->shape(), ".");
    require(c.centre_scales->dtype() == mx::bfloat16 && c.centre_scales->shape() == want_scale, kOp,
            side, " centre scales must be bfloat16 of shape ", want_scale, ", but got ",
            c.centre_scales->dtype(), " ", c.centre_scales->shape(), ".");
  }
}

/** The inputs of a call that there are. */
struct Inputs {
  mx::Stream stream;
  std::vector<mx::array> arrays;
  uint32_t given = 0;

  void add(AttentionInput kind, mx::array a) {
    arrays.push_back(std::move(a));
    given |= 1u << kind;
  }
  /** As the kernels take it. */
  void add(AttentionInput kind, const std::optional<mx::array>& a) {
    if (a) {
      add(kind, contiguous(*a, stream));
    }
  }
  void add(AttentionInput codes, AttentionInput table, AttentionInput scales, const Coded& c) {
    add(codes, contiguous(c.codes, stream));
    add(table, contiguous(c.table, mx::float32, stream));
    add(scales, c.scales);
  }
  void add_floats(AttentionInput kind, const std::optional<mx::array>& a) {
    if (a) {
      add(kind, contiguous(*a, mx::float32, stream));
    }
  }
};

void check_query_code(const mx::array& q, const mx::array& q_code) {
  require(q_code.ndim() == 4 && is_float(q_code.dtype()) && q_code.shape(0) == q.shape(0) &&
              q_code.shape(1) == q.shape(1) && q_code.shape(2) == q.shape(2),
          kOp, "q in the code basis must be floating of shape [B, Hq, L, channels] like q, ",
          q.shape(), ", but got ", q_code.dtype(), " ", q_code.shape(), ".");
}

void check_diagonal(const char* side, const mx::array& d, int heads, int width) {
  require(is_float(d.dtype()) && d.ndim() == 2 && (d.shape(0) == 1 || d.shape(0) == heads) &&
              d.shape(1) == width,
          kOp, side, " diagonal must be floating of shape [1 or ", heads, ", ", width,
          "], but got ", d.dtype(), " ", d.shape(), ".");
  require(hadamard_order(width) > 0, kOp, side,
          " diagonal must have a width of 2^k * m, m in {1, 12, 20, 28}, but got ", width, ".");
}

void check_mask(const mx::array& m, const mx::array& q) {
  bool fits = m.ndim() <= 4;
  for (int i = 2; fits && i <= static_cast<int>(m.ndim());
       ++i) {  // all axes but the last, from the right
    const int n = m.shape(-i);
    fits = n == 1 || n == q.shape(3 - i + 1);
  }
  require(fits, kOp, "mask must be broadcastable to [B, Hq, L, N] = [", q.shape(0), ", ",
          q.shape(1), ", ", q.shape(2), ", N], but got shape ", m.shape(), ".");
  require(m.ndim() > 0 && m.shape(-1) > 0, kOp,
          "mask must have a column for every token, but got shape ", m.shape(), ".");
  require(is_float(m.dtype()) || m.dtype() == mx::bool_, kOp,
          "mask must be boolean, float32, float16 or bfloat16, but got ", m.dtype(), ".");
}

/** With 4 axes. */
mx::array four_axes(const mx::array& m, mx::Stream s) {
  mx::Shape shape(4 - m.ndim(), 1);
  shape.insert(shape.end(), m.shape().begin(), m.shape().end());
  return contiguous(mx::reshape(m, shape, s), s);
}

}  // namespace

std::vector<mx::array> attention(const mx::array& q, const std::optional<mx::array>& q_code_,
                                 const Rows& rows, const mx::array& k_tail, const mx::array& v_tail,
                                 const Coded& keys, const Coded& values, const Span& span,
                                 const AttentionOptions& options, mx::StreamOrDevice s_) {
  require(is_float(q.dtype()) && q.ndim() == 4, kOp,
          "q must be floating of shape [B, Hq, L, D], but got ", q.dtype(), " ", q.shape(), ".");
  const auto& q_code = q_code_ ? *q_code_ : q;
  check_query_code(q, q_code);
  for (const auto* t : {&k_tail, &v_tail}) {
    const char* side = t == &k_tail ? "key" : "value";
    require(t->ndim() == 4 && t->dtype() == q.dtype(), kOp, side,
            " tail must have 4 dimensions and the dtype of q, ", q.dtype(), ", but got ",
            t->dtype(), " ", t->shape(), ".");
    require(t->shape(0) == q.shape(0), kOp, side, " tail must have the batch of q, ", q.shape(0),
            ", but got ", t->shape(0), ".");
  }
  require(k_tail.shape(1) == v_tail.shape(1) && k_tail.shape(2) == v_tail.shape(2), kOp,
          "key and value tails must have equal heads and tokens, but got ", k_tail.shape(), " and ",
          v_tail.shape(), ".");
  require(k_tail.shape(3) == q.shape(3), kOp, "keys must have the width of q, ", q.shape(3),
          ", but got ", k_tail.shape(3), ".");
  require(k_tail.shape(1) >= 1 && q.shape(1) % k_tail.shape(1) == 0, kOp,
          "query heads must be a multiple of the key heads, but got ", q.shape(1), " and ",
          k_tail.shape(1), ".");
  require(q.shape(3) >= 1 && q.shape(3) <= 576 && v_tail.shape(3) >= 1 && v_tail.shape(3) <= 576,
          kOp, "widths must be 1 to 576, but got ", q.shape(3), " and ", v_tail.shape(3), ".");
  const auto* layout = std::get_if<mx::array>(&rows);
  if (layout) {
    const mx::Shape shape{q.shape(0), 3};
    require(layout->dtype() == mx::int32 && layout->shape() == shape, kOp,
            "layout must be int32 of shape ", shape, ", but got ", layout->dtype(), " ",
            layout->shape(), ".");
  }
  require(span.sink_tokens >= 0 && span.window >= 0 && span.block >= 1, kOp,
          "sink_tokens and window must be >= 0 and block >= 1, but got ", span.sink_tokens, ", ",
          span.window, " and ", span.block, ".");
  // a code of its own may have any number of channels; the first of a pair has those of the keys
  const int channels = q_code.shape(3), own = keys.pair ? q.shape(3) : channels;
  require(channels >= 1 && channels <= kMaxChannels, kOp, "key codes must have 1 to ", kMaxChannels,
          " channels, but got ", channels, ".");
  check_coded("key", keys, own, k_tail, span);
  if (keys.pair) {
    require(!keys.pair->centres && !keys.pair->pair, kOp,
            "the second key code must have neither centres nor a pair of its own.");
    check_coded("second key", *keys.pair, channels - own, k_tail, span);
    require(keys.pair->codes.shape(2) == keys.codes.shape(2), kOp,
            "both key codes must have room for equal numbers of tokens, but got ",
            keys.codes.shape(2), " and ", keys.pair->codes.shape(2), ".");
  }
  require(!values.pair, kOp, "value codes must not have a pair.");
  check_coded("value", values, v_tail.shape(3), v_tail, span);
  require(keys.codes.shape(2) == values.codes.shape(2), kOp,
          "keys and values must have room for equal numbers of coded tokens, but got ",
          keys.codes.shape(2), " and ", values.codes.shape(2), ".");

  const auto& o = options;
  require(!o.mask || !o.causal, kOp, "mask must be causal or an array, but got both.");
  if (o.mask) {
    check_mask(*o.mask, q);
  }
  if (o.sinks) {
    require(is_float(o.sinks->dtype()) && o.sinks->shape() == mx::Shape{q.shape(1)}, kOp,
            "sinks must be floating of shape [Hq] = [", q.shape(1), "], but got ", o.sinks->dtype(),
            " ", o.sinks->shape(), ".");
  }
  if (o.key_diagonal) {
    require(!q_code_, kOp, "q in the code basis and a key diagonal must not come together.");
    require(!keys.pair, kOp, "a key diagonal must not come with a second key code.");
    check_diagonal("key", *o.key_diagonal, k_tail.shape(1), q.shape(3));
  }
  if (o.value_diagonal) {
    require(!o.separate, kOp, "a value diagonal must not come with separate outputs.");
    check_diagonal("value", *o.value_diagonal, v_tail.shape(1), v_tail.shape(3));
  }

  Inputs in{mx::to_stream(s_), {}};
  in.arrays.reserve(kAttentionInputs);
  in.add(kQuery, q);
  if (q_code_ || !o.key_diagonal) {
    in.add(kQueryCode, contiguous(q_code, mx::float32, in.stream));
  }
  if (layout) {
    in.add(kLayout, contiguous(*layout, in.stream));
  }
  in.add(kKeyTail, k_tail);
  in.add(kValueTail, v_tail);
  in.add(kKeyCodes, kKeyTable, kKeyScales, keys);
  in.add(kKeyCentres, keys.centres);
  in.add(kKeyCentreScales, keys.centre_scales);
  if (keys.pair) {
    in.add(kPairCodes, kPairTable, kPairScales, *keys.pair);
  }
  in.add(kValueCodes, kValueTable, kValueScales, values);
  in.add(kValueCentres, values.centres);
  in.add(kValueCentreScales, values.centre_scales);
  if (o.mask) {
    in.add(kMask, four_axes(*o.mask, in.stream));
  }
  in.add_floats(kSinks, o.sinks);
  in.add_floats(kKeyDiagonal, o.key_diagonal);
  in.add_floats(kValueDiagonal, o.value_diagonal);

  AttentionSpec spec{o.scale,       span.sink_tokens,
                     span.window,   span.block,
                     keys.stride,   keys.pair ? keys.pair->stride : 0,
                     values.stride, o.causal,
                     o.separate,    layout ? std::nullopt : std::optional(std::get<1>(rows)),
                     in.given};
  mx::Shape shape{q.shape(0), q.shape(1), q.shape(2), v_tail.shape(3)};
  auto primitive = std::make_shared<Attention>(in.stream, spec);
  if (o.separate) {
    return mx::array::make_arrays({shape, shape}, {mx::float32, mx::float32}, primitive, in.arrays);
  }
  return {mx::array(std::move(shape), q.dtype(), std::move(primitive), std::move(in.arrays))};
}

mx::array AttentionPlan::operator()(const mx::array& q, const Rows& rows, const mx::array& k_tail,
                                    const mx::array& v_tail, float scale, bool causal) const {
  AttentionOptions options{};
  options.scale = scale;
  options.causal = causal;
  options.key_diagonal = key_diagonal;
  options.value_diagonal = value_diagonal;
  return attention(q, std::nullopt, rows, k_tail, v_tail, keys, values, span, options)[0];
}

}  // namespace vqkv
