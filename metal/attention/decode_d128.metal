// Decode attention at head dim 128.
#include "attention/decode.h"

DECODE("decode_float16_d128", half, 128)
DECODE("decode_bfloat16_d128", bfloat, 128)
DECODE("decode_float32_d128", float, 128)
