// Included once in each of metal, metal::precise and metal::fast by math.h.
MH_UNARY_FUNCTIONS(MH_UNARY)
MH_BINARY_FUNCTIONS(MH_BINARY)
MH_TERNARY_FUNCTIONS(MH_TERNARY)
MH_FOR_EACH_INTEGER(MH_INTEGER_MIN_MAX)
MH_MIN_MAX(float, fmax(a, b), fmin(a, b), fabs(a))
MH_MIN_MAX(half, fmax(a, b), fmin(a, b), fabs(a))
MH_FLOAT_ONLY(float)
MH_FLOAT_ONLY(half)
MH_FROM_BFLOAT(abs)
template <class B, class = enable_if_t<__is_same(B, bfloat)>>
MH_FN float max(B x, B y) {
  return fmax((float)x, (float)y);
}
template <class B, class = enable_if_t<__is_same(B, bfloat)>>
MH_FN float min(B x, B y) {
  return fmin((float)x, (float)y);
}

#define MH_VECTOR_MIN_MAX(NAME)                                                   \
  template <class T, int N>                                                       \
  MH_FN vec<T, N> NAME(vec<T, N> v, vec<T, N> w)                                  \
      MH_MAP(NAME(v.e[i], w.e[i])) template <class T, int N>                      \
      MH_FN vec<T, N> NAME(vec<T, N> v, typename metal_host::identity<T>::type w) \
          MH_MAP(NAME(v.e[i], w))
MH_VECTOR_MIN_MAX(max)
MH_VECTOR_MIN_MAX(min)
#undef MH_VECTOR_MIN_MAX
template <class T, int N>
MH_FN vec<T, N> clamp(vec<T, N> v, vec<T, N> lo, vec<T, N> hi)
    MH_MAP(clamp(v.e[i], lo.e[i], hi.e[i])) template <class T, int N>
    MH_FN vec<T, N> clamp(vec<T, N> v, typename metal_host::identity<T>::type lo,
                          typename metal_host::identity<T>::type hi)
        MH_MAP(clamp(v.e[i], lo, hi)) template <class T, int N>
        MH_FN vec<T, N> abs(vec<T, N> v) MH_MAP(abs(v.e[i])) template <class T, int N>
        MH_FN vec<T, N> sign(vec<T, N> v) MH_MAP(sign(v.e[i])) template <class T, int N>
        MH_FN vec<T, N> saturate(vec<T, N> v) MH_MAP(saturate(v.e[i]))

            MH_FN float sincos(float x, float& c) {
  c = cos(x);
  return sin(x);
}
MH_FN float frexp(float x, int& e) {
  return __builtin_frexpf(x, &e);
}
MH_FN half frexp(half x, int& e) {
  return (half)__builtin_frexpf((float)x, &e);
}
MH_FN float ldexp(float x, int e) {
  return __builtin_ldexpf(x, e);
}
MH_FN half ldexp(half x, int e) {
  return (half)__builtin_ldexpf((float)x, e);
}
MH_FN float modf(float x, float& i) {
  return __builtin_modff(x, &i);
}
