// Flash attention at head dim 96. src/core/plans/attention_tiles.h has the reasons for the tiles.
#include "attention/flash.h"

//    name                                              T       D  BK WM WN DS RF SHARED
FLASH("flash_float16_d96_r64_bk32_4x2", half, 96, 32, 4, 2, 1, 2, false)
FLASH("flash_bfloat16_d96_r64_bk32_4x2", bfloat, 96, 32, 4, 2, 1, 2, false)
FLASH("flash_float32_d96_r64_bk32_4x2", float, 96, 32, 4, 2, 1, 2, true)
