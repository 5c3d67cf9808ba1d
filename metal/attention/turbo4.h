// Constants of the page format turbo4, shared by src/core/page_format.h and the shaders.
#pragma once

// Magnitudes of turbo4's centroids (index 8 to 15; 7 to 0 are their negatives) and the midpoints
// between them, for a unit vector of 128 values.
#define CHUNKDELTA_TURBO4_CENTROIDS \
  0.006938f, 0.020989f, 0.035597f, 0.051262f, 0.068756f, 0.089527f, 0.117195f, 0.173926f
#define CHUNKDELTA_TURBO4_MIDPOINTS \
  0.013963f, 0.028293f, 0.043430f, 0.060009f, 0.079142f, 0.103361f, 0.145560f
