// orders: which tiles of queries a block takes, and how its warps hear of it.
//
// Tiles have numbers. A block begins with the tile of its own number; whenever it is about to run out of keys to
// copy, one of its warps takes the next number and tells the others. So blocks that had short tiles take more of
// them, and all end together, though nobody knows beforehand how long each takes.
//
// NOTE: a number that is taken early is one that nobody else can take. At 8 tiles a block and a causal mask each
// tile taken ahead costs several percent; so the warp that copies keys asks for the next tile when it has started
// the last copy of this one, which is just in time.
#pragma once
#include "prim/mbarrier.cuh"
#include "prim/numbers.cuh"
#include "prim/packed.cuh"
#include "prim/paging.cuh"
#include "prim/sight.cuh"

constexpr int BOXES = BLOCK_N / BOX;  // copies that bring a panel of keys
static_assert(BLOCK_N % BOX == 0 && BOXES <= WARP && (BOXES == 1 || BOX % 8 == 0), "a lane has a box");

/// A tile of queries, of a sequence and a head, from query m0 on; none if that is below 0.
struct alignas(16) Order {
  Sequence seq;
  int h, m0;
};

struct Sizes {
  int B, H, M, N, GROUP, section, left, right;
  float squash;
  const int *g_begin_q, *g_begin_k;
  View<const int, 2> g_table;

  METHOD int m_tiles() const { return ceil_div(M, BLOCK_M); }
  METHOD int tiles() const { return B * H * m_tiles(); }
  /// Sequence b of arrays that are not packed.
  METHOD Sequence sequence(int b) const { return {b, b, 0, 0, M, N}; }
  /// The tile with this number. Heads come section after section, so that keys and values are still in the L2
  /// cache; in a section the last tiles of all heads come first, which see the most keys under a causal mask. With
  /// VARLEN each sequence has as many tiles as the longest. A warp calls it.
  METHOD Order order(int number) const {
    const int first = number / (section * m_tiles()) * section, heads = min(section, B * H - first);
    const int single = number - first * m_tiles(), head = first + single % heads, i = head / H;
    return {VARLEN ? packed_sequence(g_begin_q, g_begin_k, i) : sequence(i), head % H,
            (m_tiles() - 1 - single / heads) * BLOCK_M};
  }
};

/// A tile of queries, and its keys, whose tiles are taken from the last to the first: number 0 to tiles − 1,
/// of which those from `whole` to `part` − 1 are seen whole.
struct Work : Order {
  int end, tiles, whole, part;

  METHOD Work(const Order& order, const Sizes& size) : Order(order) {
    const Tiles seen = sight(size).template tiles<BLOCK_N>(m0, min(m0 + BLOCK_M, seq.M) - 1);
    end = seen.end;
    tiles = seen.end - seen.first;
    whole = seen.end - seen.part;
    part = seen.end - seen.whole;
  }
  METHOD Sight<CAUSAL, WINDOW> sight(const Sizes& size) const {
    return {seq.M, seq.N, size.left, size.right};
  }
  /// First key of tile i.
  METHOD int key0(int i) const { return (end - 1 - i) * BLOCK_N; }

  /// Where the calling lane's box of tile i begins: at a row of an array, or of a page. NOTE: no page is number
  /// −1, and what is copied of it are zeros.
  struct Place {
    int b, row;
  };
  METHOD Place place(int i, const Sizes& size) const {
    if constexpr (PAGE_SIZE > 0) {
      const int key = key0(i) + lane_id() * BOX;
      const bool there = lane_id() < BOXES && key < seq.N;
      return {there ? page_of<PAGE_SIZE>(size.g_table.at(seq.i), key) : -1,
              key % PAGE_SIZE};
    }
    return {seq.b, seq.k0 + key0(i)};
  }
};

/// Where the order lies that is given, and who has heard it: each thread for itself.
/// NOTE: all lanes of a warp read it from one place, so the compiler knows that what follows from it is the same for
/// the warp, and makes descriptors in uniform registers. Of numbers that one lane read and shuffled to the others it
/// does not: 60 instructions more in the main loop.
struct OrderSlot {
  Order order;
  Mbarrier full, empty;

  METHOD void init(int warps SITE) {
    mbarrier_init(full, 1 AT_SITE), mbarrier_init(empty, warps * WARP AT_SITE);
  }
};

/// A warp's view of it: of who gives, or of one of those who hear.
struct Orders {
  OrderSlot& s;
  const Sizes& size;
  uint32_t number = 0;

  METHOD void give(const Order& order SITE) {
    if (lane_id() == 0) {
      store_shared(&s.order, order AT_SITE);
      mbarrier_arrive(s.full AT_SITE);
    }
    ++number;
  }
  /// Until all have asked for the one behind.
  METHOD void wait_until_asked(SITE_ONLY) const { mbarrier_wait(s.empty, (number + 1) % 2 AT_SITE); }

  METHOD Order hear(SITE_ONLY) {
    mbarrier_wait(s.full, number++ % 2 AT_SITE);
    Order order = load_shared(&s.order AT_SITE);
    if (!VARLEN) order.seq = size.sequence(order.seq.b);  // of which the compiler knows most
    return order;
  }
  METHOD void ask(SITE_ONLY) const { mbarrier_arrive(s.empty AT_SITE); }
  METHOD Order hear_and_ask(SITE_ONLY) {
    const Order order = hear(ONLY_AT_SITE);
    ask(ONLY_AT_SITE);
    return order;
  }
};

/// What the giving warp does. Tiles past the end of their sequence it passes over, those that see no key too:
/// `blind` gets them.
template <class Blind> DEVICE void give_orders(OrderSlot& s_slot, const Sizes& size, int* g_taken, Blind blind) {
  Orders orders{s_slot, size};
  const int tiles = size.tiles();
#pragma unroll 1
  for (int number = blockIdx.x; number < tiles;) {
    const Order order = size.order(number);
    if (!VARLEN || order.m0 < order.seq.M) {
      const Work work(order, size);
      if (work.tiles > 0)
        orders.give(order), orders.wait_until_asked();
      else
        blind(work);
    }
    number = gridDim.x + shuffle(lane_id() == 0 ? take_number(g_taken, tiles) : 0, 0);
  }
  orders.give({{}, 0, -1});
}
