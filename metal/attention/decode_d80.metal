// Decode attention at head dim 80.
#include "attention/decode.h"

DECODE("decode_float16_d80", half, 80)
DECODE("decode_bfloat16_d80", bfloat, 80)
DECODE("decode_float32_d80", float, 80)
