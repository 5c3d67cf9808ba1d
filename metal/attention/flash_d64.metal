// Flash attention at head dim 64. src/core/plans/attention_tiles.h has the reasons for the tiles.
#include "attention/flash.h"

//    name                                              T       D  BK WM WN DS RF SHARED
FLASH("flash_float16_d64_r64_bk32_4x2", half, 64, 32, 4, 2, 1, 2, false)
FLASH("flash_bfloat16_d64_r64_bk32_4x2", bfloat, 64, 32, 4, 2, 1, 2, false)
FLASH("flash_float32_d64_r64_bk32_4x2", float, 64, 32, 4, 2, 1, 2, false)
