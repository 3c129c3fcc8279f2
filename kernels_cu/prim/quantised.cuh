// quantised: products of mma.sync whose right operand lies in shared memory as bytes (byte.cuh), two in each
// 16-bit element of its tile. They become float16 in registers, exactly, on their way to the tensor cores.
//
// NOTE: what a lane gets from ldmatrix are neighbours: four of a row, or two of two rows. mma.sync wants pairs 8
// columns apart, and a column's two rows. So columns trade places within 16: those of the left operand in
// `take_rows`, as nothing of the product depends on them; those of the result in its store (`four_columns`).
#pragma once
#include "prim/byte.cuh"
#include "prim/mma.cuh"

/// acc += A Bᵀ; s_a as `take_rows` leaves it, s_b [column][k], bytes of type T.
template <class T, class Acc, class TileA, class TileB>
DEVICE void multiply_abt_bytes(Acc& acc, const TileA& s_a, const TileB& s_b SITE) {
  static_assert(TileA::COLS == 2 * TileB::COLS && TileB::ROWS == Acc::COLS && Acc::M_TILES == 1,
                "shapes must agree");
  constexpr int UNROLL = TileB::COLS <= 64 ? 4 : 1;  // whole, but where wide accumulators would spill
#pragma unroll UNROLL
  for (int k = 0; k < TileB::COLS; k += MMA_K) {
    uint32_t a[2][4];
    load_a(a[0], s_a, 0, 2 * k AT_SITE);
    load_a(a[1], s_a, 0, 2 * k + MMA_K AT_SITE);
#pragma unroll
    for (int n = 0; n < Acc::N_TILES; n += 2) {
      uint32_t words[2][2];
      load_b_rows(words, s_b, n * MMA_N, k AT_SITE);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t b[2];
          widen<T, false>(b, words[i][step]);
          mma_16816<float16>(acc.tile[0][n + i], a[step], b AT_SITE);
        }
    }
  }
}

/// acc += A B, A a float32 accumulator rounded where it lies to the sum of TERMS float16, s_b [k][column], bytes
/// of type T. Column 2 j + e of 16 becomes column j of tile column e.
template <class T, int TERMS, class Acc, class AccA, class TileB>
DEVICE void multiply_ab_bytes(Acc& acc, const AccA& r_a, const TileB& s_b SITE) {
  static_assert(AccA::COLS == TileB::ROWS && 2 * TileB::COLS == Acc::COLS && Acc::M_TILES == 1,
                "shapes must agree");
#pragma unroll
  for (int k = 0; k < AccA::N_TILES; k += 2) {
    uint32_t a[TERMS][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low = r_a.tile[0][k + i / 2][i % 2 * 2], high = r_a.tile[0][k + i / 2][i % 2 * 2 + 1];
#pragma unroll
      for (int term = 0; term < TERMS; ++term) {
        a[term][i] = pack2<float16>(low, high);
        low -= to_float(float16{uint16_t(a[term][i])}), high -= to_float(float16{uint16_t(a[term][i] >> 16)});
      }
    }
#pragma unroll
    for (int n = 0; n < TileB::COLS / MMA_N; n += 2) {
      uint32_t words[2][2];
      load_b_cols(words, s_b, k * MMA_N, n * MMA_N AT_SITE);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t first[2], last[2];  // keys of the first 8 rows of the step, and of the last 8
        widen<T, true>(first, words[i][0]);
        widen<T, true>(last, words[i][1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t b[2] = {first[e], last[e]};
#pragma unroll
          for (int term = 0; term < TERMS; ++term)
            mma_16816<float16>(acc.tile[0][2 * (n + i) + e], a[term], b AT_SITE);
        }
      }
    }
  }
}

/// Of a row that `multiply_ab_bytes` has left: the first of the four neighbouring columns that a lane holds in
/// tile columns n and n + 1 (n even), and those.
DEVICE int first_column(int n) { return n * MMA_N + 4 * (lane_id() % 4); }
template <class Acc> DEVICE Vec16 four_columns(const Acc& acc, int n, int half, float factor) {
  const auto number = [&](int e) {
    return __float_as_uint(acc.tile[0][n + e % 2][2 * half + e / 2] * factor);
  };
  return Vec16{{number(0), number(1), number(2), number(3)}};
}

constexpr int power_of_two_above(int x) { return x <= 1 ? 1 : 2 * power_of_two_above((x + 1) / 2); }

/// Makes a warp's rows of 16-bit floats, in place, the left operand of `multiply_abt_bytes`: float16, each row
/// times a power of two that puts its largest number between 2¹⁴ and 2¹⁵, so that a bfloat16 loses nothing that
/// counts. `undo` takes it back in a lane's rows of an accumulator.
template <class T, class Tile> DEVICE void take_rows(Tile& s, float (&undo)[2] SITE) {
  constexpr int LANES = WARP / power_of_two_above(Tile::ROWS);  // a row's
  const int row = lane_id() / LANES, mine = row < Tile::ROWS ? lane_id() % LANES * 16 : Tile::COLS;
  const auto at = [&](int col) { return reinterpret_cast<Vec16*>(s.at(row, col)); };
  uint32_t top = 0;  // magnitudes of 16-bit floats are ordered like integers
#pragma unroll 1
  for (int col = mine; col < Tile::COLS; col += 16 * LANES)
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      const Vec16 eight = load_shared(at(col + 8 * chunk) AT_SITE);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        top = max(top, max(eight.word[i] & 0x7fffu, eight.word[i] >> 16 & 0x7fffu));
    }
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2)
    top = max(top, shuffle_xor(top, distance AT_SITE));
  const int exponent = min(141 - int(__float_as_uint(to_float(T{uint16_t(top)})) >> 23), 120);
  const float factor = __int_as_float((127 + exponent) << 23);
#pragma unroll 1
  for (int col = mine; col < Tile::COLS; col += 16 * LANES) {
    const Vec16 first = load_shared(at(col) AT_SITE), second = load_shared(at(col + 8) AT_SITE);
    const auto scaled = [&](uint32_t both) {
      return pack2<float16>(to_float(T{uint16_t(both)}) * factor, to_float(T{uint16_t(both >> 16)}) * factor);
    };
    const uint32_t(&a)[4] = first.word, (&b)[4] = second.word;
    store_shared(at(col), Vec16{{scaled(a[0]), scaled(a[2]), scaled(b[0]), scaled(b[2])}} AT_SITE);
    store_shared(at(col + 8), Vec16{{scaled(a[1]), scaled(a[3]), scaled(b[1]), scaled(b[3])}} AT_SITE);
  }
  const float back = __int_as_float((127 - exponent) << 23);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    undo[half] = shuffle(back, min(lane_id() / 4 + 8 * half, Tile::ROWS - 1) * LANES AT_SITE);
  warp_sync(ONLY_AT_SITE);
}
