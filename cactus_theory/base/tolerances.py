"""Tolerances by dtype: sums of rows, sums of stored rows, and logits of one model."""

import torch

# largest |sum of a row − 1|: about the error of a softmax in this dtype over many tokens
ROW_SUM_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
# dtypes in which rows are decided on a CPU; rows of other dtypes are converted to float32
DECIDED = (torch.float32, torch.float64)
# least q of a token that may rise: p/q of normal numbers stays finite
LEAST = 2.3e-308
# largest p/q of a token that may rise, about 1/LEAST
MOST = 4e307
# largest |sum − 1| of rows meant to sum to 1: rows rounded when written, or of half precision
NEAR_ONE = 1e-2
# largest |sum of a stored row − 1|: storing moves a log-probability of −16 in float16 by
# 2⁻⁸ at most, and in float32 by far less than rows of that dtype may miss 1 anyway
STORED_SUM_TOLERANCE = {torch.float16: 1e-2, torch.float32: 1e-4}
# Logits of one model with and without a cache: root of the mean squared difference over that of
# the logits around their mean. Measured on tiny models of the library's families: rounding up to
# 6e-7 in float32; positions, masks or caches that differ from 0.4 on. Half precision rounds by
# about 1e-2 in deep models.
LOGITS_TOLERANCE, HALF_LOGITS_TOLERANCE = 1e-3, 0.1
