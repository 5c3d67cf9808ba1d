// Decode attention at head dim 256.
#include "attention/decode.h"

DECODE("decode_float16_d256", half, 256)
DECODE("decode_bfloat16_d256", bfloat, 256)
DECODE("decode_float32_d256", float, 256)
