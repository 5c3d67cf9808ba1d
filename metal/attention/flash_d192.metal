// Flash attention at head dim 192. src/core/plans/attention_tiles.h has the reasons for the tiles.
#include "attention/flash.h"

//    name                                              T       D  BK WM WN DS RF SHARED
FLASH("flash_float16_d192_r64_bk16_4x2", half, 192, 16, 4, 2, 2, 2, false)
FLASH("flash_bfloat16_d192_r64_bk16_4x2", bfloat, 192, 16, 4, 2, 2, 2, false)
FLASH("flash_float32_d192_r32_bk16_4x2", float, 192, 16, 4, 2, 2, 1, true)
