// traits: what the machine needs of <type_traits>. NOTE: that header and <utility> cost a third of what a quick
// build spends on reading.
#pragma once

namespace simt {

template <class T> struct Plain { using type = T; };
template <class T> struct Plain<const T> { using type = T; };
template <class T> struct Plain<volatile T> { using type = T; };
template <class T> struct Plain<const volatile T> { using type = T; };
template <class T> struct Plain<T&> : Plain<T> {};
template <class T> struct Plain<T&&> : Plain<T> {};
/// T itself: no reference, neither const nor volatile.
template <class T> using plain = typename Plain<T>::type;

template <class T> struct Same { using type = T; };
/// T, where a call must have said elsewhere what T is.
template <class T> using same = typename Same<T>::type;

/// What A and B become in arithmetic.
template <class A, class B> using common = decltype(true ? A() : B());

}  // namespace simt
