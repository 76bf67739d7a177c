#pragma once

#include "common.h"
#include "metal_params.h"

namespace vqkv {

/** {signs, norms} of the vectors of x; see ops.qjl_encode. */
std::vector<mx::array> qjl_encode(const mx::array& x, const mx::array& sketch,
                                  mx::StreamOrDevice s = {});

/** Estimated inner products of queries and coded keys; see ops.qjl_inner_product. */
mx::array qjl_inner_product(const mx::array& q, const mx::array& sketch, const mx::array& signs,
                            const mx::array& norms, mx::StreamOrDevice s = {});

/** Extents of a product of vectors [..., D] with a sketch. */
QjlParams qjl_params(const mx::Shape& x, const mx::Shape& sketch);

/** Extents of the estimates, of shape `out`, for coded keys of shape `signs`. */
QjlScoresParams qjl_scores_params(const mx::Shape& out, const mx::Shape& signs);

}  // namespace vqkv
