// Flash attention at head dim 256. src/core/plans/attention_tiles.h has the reasons for the tiles.
#include "attention/flash.h"

//    name                                              T       D  BK WM WN DS RF SHARED
FLASH("flash_float16_d256_r64_bk32_4x4", half, 256, 32, 4, 4, 2, 2, true)
FLASH("flash_bfloat16_d256_r64_bk32_4x4", bfloat, 256, 32, 4, 4, 2, 2, true)
FLASH("flash_float32_d256_r32_bk16_4x2", float, 256, 16, 4, 2, 2, 1, true)
