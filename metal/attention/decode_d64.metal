// Decode attention at head dim 64.
#include "attention/decode.h"

DECODE("decode_float16_d64", half, 64)
DECODE("decode_bfloat16_d64", bfloat, 64)
DECODE("decode_float32_d64", float, 64)
