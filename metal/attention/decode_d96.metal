// Decode attention at head dim 96.
#include "attention/decode.h"

DECODE("decode_float16_d96", half, 96)
DECODE("decode_bfloat16_d96", bfloat, 96)
DECODE("decode_float32_d96", float, 96)
