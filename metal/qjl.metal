#include "qjl.h"

#define QJL(tname, T)                                     \
  instantiate_kernel(qjl_encode_##tname, qjl_encode, T)   \
  instantiate_kernel(qjl_project_##tname, qjl_project, T) \
  instantiate_kernel(qjl_scores_##tname, qjl_scores, T)

QJL(float32, float)
QJL(float16, half)
QJL(bfloat16, bfloat)
