// Decode attention at head dim 192.
#include "attention/decode.h"

DECODE("decode_float16_d192", half, 192)
DECODE("decode_bfloat16_d192", bfloat, 192)
DECODE("decode_float32_d192", float, 192)
