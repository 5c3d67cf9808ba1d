// Type traits and numeric limits; included inside namespace metal.
typedef ::half half;
typedef ::bfloat bfloat;
typedef ::uchar uchar;
typedef ::ushort ushort;
typedef ::uint uint;
typedef ::ulong ulong;
typedef ::size_t size_t;

template <class T, T V>
struct integral_constant {
  static constexpr T value = V;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return V; }
  constexpr T operator()() const { return V; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

template <class T>
struct remove_const {
  typedef T type;
};
template <class T>
struct remove_const<const T> {
  typedef T type;
};
template <class T>
struct remove_volatile {
  typedef T type;
};
template <class T>
struct remove_volatile<volatile T> {
  typedef T type;
};
template <class T>
struct remove_cv {
  typedef typename remove_const<typename remove_volatile<T>::type>::type type;
};
template <class T>
using remove_const_t = typename remove_const<T>::type;
template <class T>
using remove_cv_t = typename remove_cv<T>::type;
template <class T>
struct remove_reference {
  typedef T type;
};
template <class T>
struct remove_reference<T&> {
  typedef T type;
};
template <class T>
struct remove_reference<T&&> {
  typedef T type;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;
template <class T>
struct remove_pointer {
  typedef T type;
};
template <class T>
struct remove_pointer<T*> {
  typedef T type;
};
template <class T>
using remove_pointer_t = typename remove_pointer<T>::type;
template <class T>
struct remove_addrspace {
  typedef T type;
};
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class T>
using decay_t = remove_cv_t<remove_reference_t<T>>;

template <class T, class U>
constexpr bool is_same_v = __is_same(T, U);
template <class T>
constexpr bool is_floating_point_v =
    __is_floating_point(remove_cv_t<T>) || __is_same(remove_cv_t<T>, half) ||
    __is_same(remove_cv_t<T>, bfloat);
template <class T>
constexpr bool is_integral_v = __is_integral(T);
template <class T>
constexpr bool is_signed_v = __is_signed(T) || is_floating_point_v<T>;
template <class T>
constexpr bool is_unsigned_v = __is_unsigned(T);
template <class T>
constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T>
constexpr bool is_pointer_v = __is_pointer(T);
template <class T>
constexpr bool is_enum_v = __is_enum(T);
template <class T>
constexpr bool is_class_v = __is_class(T);
template <class From, class To>
constexpr bool is_convertible_v = __is_convertible_to(From, To);

template <class T, class U>
struct is_same : bool_constant<is_same_v<T, U>> {};
#define MH_TRAIT(NAME) \
  template <class T>   \
  struct NAME : bool_constant<NAME##_v<T>> {};
MH_TRAIT(is_floating_point)
MH_TRAIT(is_integral)
MH_TRAIT(is_signed)
MH_TRAIT(is_unsigned)
MH_TRAIT(is_arithmetic)
MH_TRAIT(is_pointer)
MH_TRAIT(is_enum)
MH_TRAIT(is_class)
template <class From, class To>
struct is_convertible : bool_constant<is_convertible_v<From, To>> {};

template <class T>
T&& declval();
template <class... B>
struct conjunction : bool_constant<(B::value && ...)> {};
template <class... B>
struct disjunction : bool_constant<(B::value || ...)> {};
template <class B>
struct negation : bool_constant<!B::value> {};
// The names that MLX's headers use.
template <class... B>
struct _conjunction : bool_constant<(B::value && ...)> {};
template <class... B>
struct _disjunction : bool_constant<(B::value || ...)> {};
template <class B>
struct _negation : bool_constant<!B::value> {};

template <class T, T... I>
struct integer_sequence {};
template <size_t... I>
using index_sequence = integer_sequence<size_t, I...>;
template <class T, T N>
using make_integer_sequence = __make_integer_seq<integer_sequence, T, N>;
template <size_t N>
using make_index_sequence = __make_integer_seq<integer_sequence, size_t, N>;

template <class T>
using make_signed_t = __make_signed(T);
template <class T>
using make_unsigned_t = __make_unsigned(T);
template <class T>
struct make_signed {
  typedef __make_signed(T) type;
};
template <class T>
struct make_unsigned {
  typedef __make_unsigned(T) type;
};

template <class T>
struct numeric_limits;
#define MH_INTEGER_LIMITS(T, MIN, MAX, DIGITS)   \
  template <>                                    \
  struct numeric_limits<T> {                     \
    static constexpr bool is_signed = (MIN) < 0; \
    static constexpr bool is_integer = true;     \
    static constexpr int digits = DIGITS;        \
    static constexpr T min() { return MIN; }     \
    static constexpr T max() { return MAX; }     \
    static constexpr T lowest() { return MIN; }  \
  };
MH_INTEGER_LIMITS(bool, 0, 1, 1)
MH_INTEGER_LIMITS(char, -128, 127, 7)
MH_INTEGER_LIMITS(signed char, -128, 127, 7)
MH_INTEGER_LIMITS(uchar, 0, 255, 8)
MH_INTEGER_LIMITS(short, SHRT_MIN, SHRT_MAX, 15)
MH_INTEGER_LIMITS(ushort, 0, USHRT_MAX, 16)
MH_INTEGER_LIMITS(int, INT_MIN, INT_MAX, 31)
MH_INTEGER_LIMITS(uint, 0, UINT_MAX, 32)
MH_INTEGER_LIMITS(long, LONG_MIN, LONG_MAX, 63)
MH_INTEGER_LIMITS(ulong, 0, ULONG_MAX, 64)
#define MH_FLOAT_LIMITS(T, MIN, MAX, EPSILON, DIGITS)                \
  template <>                                                        \
  struct numeric_limits<T> {                                         \
    static constexpr bool is_signed = true;                          \
    static constexpr bool is_integer = false;                        \
    static constexpr int digits = DIGITS;                            \
    static constexpr T min() { return (T)(MIN); }                    \
    static constexpr T max() { return (T)(MAX); }                    \
    static constexpr T lowest() { return (T)(-(MAX)); }              \
    static constexpr T epsilon() { return (T)(EPSILON); }            \
    static constexpr T infinity() { return (T)__builtin_inff(); }    \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); } \
  };
MH_FLOAT_LIMITS(float, 0x1p-126f, 0x1.fffffep127f, 0x1p-23f, 24)
MH_FLOAT_LIMITS(half, 0x1p-14f, 65504.f, 0x1p-10f, 11)
MH_FLOAT_LIMITS(bfloat, 0x1p-126f, 0x1.fep127f, 0x1p-7f, 8)
