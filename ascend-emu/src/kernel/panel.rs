//! Attention of a block of many queries: prefill, and decode with large groups.
//!
//! The tile of scores is kept with keys down and queries across, so that a vector holds one key's scores of a *panel*
//! of 16 queries. Neither key nor value tiles need transposing, and maxima, sums and exponentials run along the
//! vectors without horizontal steps. Both products keep as many sums as the registers hold (see [`super::simd`]): scores
//! take rows of keys by panels, output takes rows of queries by 16 value columns.
//!
//! A tile meets one *slab* of three panels after the other, scores, softmax and output: the scores of a slab, 18 kB, stay
//! in the first cache, where those of a whole block did not. That, and blocks of twice as many queries, made products that
//! ran at 0.55 to 0.65 of the peak of AVX-512 run at 0.63 to 0.77.
//!
//! A thread needs `2 * 384 * d + 2 * 96 * 9/8 * d + 96 * 48` floats for head dimension `d`, rounded up to 128 in the second
//! term: 0.5 MB at 128, and another 37 kB where there is a mask tensor. More queries to a block fetch each tile less often;
//! more keys to a tile touch the output less often; both are bounded by what the second cache holds.

use super::ahead::{AHEAD, Ahead};
use super::attention::{Attention, Sequence};
use super::exp::exp2;
use super::fetch::{Fetch, Places, tile_vectors};
use super::finish::State;
use super::products::{self, LANES, PANELS, Score, Weigh, union};
use super::requests::Requests;
use super::schedule::{Task, Work};
use super::scratch::{Scratch, take};
use super::simd::{Kernel, Simd, Vector, WIDTH, all_finite};
use super::softmax::weights;
use super::tile::{Hidden, KEYS, look, read_bias};
use ascend_spec::Tile;
use std::ops::Range;

/// Queries in a block.
pub(crate) const QUERIES: usize = 384;

/// Slabs in a block.
const SLABS: usize = QUERIES / LANES;

/// Tiles that are passed over at once where nobody sees them.
const STRIDE: usize = 16;

const _: () = assert!((QUERIES / 2).is_multiple_of(LANES));

/// What the panels of a slab see of a tile. Keys count from the tile's first.
#[derive(Clone)]
struct Sight {
    /// The keys that any query of a panel sees.
    keys: [Range<usize>; PANELS],
    /// Whether some of them are hidden from some queries.
    mixed: [bool; PANELS],
    /// Which.
    hidden: [Hidden; PANELS],
}

/// The buffers of a block.
struct Block<'s> {
    /// Of each panel, element `d` of its queries.
    queries: &'s mut [Vector],
    /// A tile of keys, cut into stretches.
    keys: &'s mut [Vector],
    /// A tile of values, cut into stretches.
    values: &'s mut [Vector],
    /// One query, key or value.
    row: &'s mut [Vector],
    /// Scores of a slab.
    scores: &'s mut [Vector],
    /// Output of each query, row by row, not yet divided by the sum.
    out: &'s mut [Vector],
    /// Running maximum of each query.
    max: &'s mut [Vector],
    /// Running sum of each query.
    sum: &'s mut [Vector],
    /// What a mask tensor hides from each panel.
    ahead: [Ahead<'s>; SLABS * PANELS],
    /// What each slab sees of the tile.
    sights: [Sight; SLABS],
    /// Rows of the next tile.
    requests: Requests,
}

/// What is at work together: a few panels of queries and a tile.
pub(super) struct Slab<'s> {
    pub(super) queries: &'s [Vector],
    /// A tile of keys, cut into stretches.
    pub(super) keys: &'s [Vector],
    /// Its values, likewise.
    pub(super) values: &'s [Vector],
    /// Of each key, the score and then the weight of each query.
    pub(super) scores: &'s mut [Vector],
    pub(super) out: &'s mut [Vector],
    /// Vectors of an output.
    pub(super) columns: usize,
    max: &'s mut [Vector],
    sum: &'s mut [Vector],
    /// Factor of each query that the last tile puts on what was before.
    pub(super) decay: [Vector; PANELS],
    /// Rows of the next tile.
    pub(super) requests: &'s mut Requests,
}

/// Some queries of one key head, and what they attend to.
#[derive(Clone, Copy)]
struct Prefill<'a> {
    attention: &'a Attention,
    sequence: &'a Sequence,
    task: &'a Task,
    /// Whether a tile of keys does for its values, too.
    shares: bool,
}

impl<'s> Block<'s> {
    fn new(scratch: &'s mut Scratch, of: Prefill<'_>) -> Self {
        let (key_vectors, columns) = (of.attention.vectors(), of.attention.columns());
        let slabs = of.count().div_ceil(LANES);
        let sizes = [
            slabs * PANELS * key_vectors * WIDTH,
            tile_vectors(key_vectors),
            if of.shares { 0 } else { tile_vectors(columns) },
            key_vectors.max(columns),
            KEYS * PANELS,
            slabs * LANES * columns,
            slabs * PANELS,
            slabs * PANELS,
        ];
        let of_panel = of.attention.mask.as_ref().map_or(0, |_| AHEAD);
        let (mut rest, mut bits) =
            scratch.vectors_and_bits(sizes.iter().sum(), slabs * PANELS * of_panel);
        let [queries, keys, values, row, scores, out, max, sum] =
            sizes.map(|size| take(&mut rest, size));
        Block {
            queries,
            keys,
            values,
            row,
            scores,
            out,
            max,
            sum,
            ahead: std::array::from_fn(|panel| {
                let size = if panel < slabs * PANELS { of_panel } else { 0 };
                Ahead::new(take(&mut bits, size))
            }),
            sights: [const {
                Sight {
                    keys: [const { 0..0 }; PANELS],
                    mixed: [false; PANELS],
                    hidden: [[0; KEYS]; PANELS],
                }
            }; SLABS],
            requests: Requests::none(),
        }
    }

    /// Forgets the keys that were seen.
    fn clear(&mut self) {
        self.out.fill([0.0; WIDTH]);
        self.max.fill([f32::NEG_INFINITY; WIDTH]);
        self.sum.fill([0.0; WIDTH]);
    }
}

/// Attends to the keys of `task`: maximum, sum and output of each of its queries.
pub(super) struct Attend<'a, 's>(pub(super) Work<'a, 's>);

impl<'s> Kernel for Attend<'_, 's> {
    type Output = State<'s>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> State<'s> {
        attend(simd, self.0)
    }
}

#[inline(always)]
fn attend<'s, S: Simd>(simd: S, work: Work<'_, 's>) -> State<'s> {
    let of = Prefill {
        attention: work.attention,
        sequence: work.sequence,
        task: work.task,
        shares: work.attention.values_are_keys(work.sequence),
    };
    let mut block = Block::new(work.scratch, of);
    of.pack_queries(simd, &mut block);
    let (count, columns) = (of.count(), of.attention.columns());
    // Whether values are finite is looked at only where the output is not: then it is computed again, since a value of
    // weight 0 must add nothing, whatever it is.
    for with_care in [false, true] {
        block.clear();
        of.pass(simd, &mut block, with_care);
        if all_finite(simd, &block.out[..count * columns]) {
            break;
        }
    }
    let Block { out, max, sum, .. } = block;
    State {
        max: &mut max.as_flattened_mut()[..count],
        sum: &mut sum.as_flattened_mut()[..count],
        out: &mut out[..count * columns],
    }
}

impl Prefill<'_> {
    /// Queries.
    fn count(self) -> usize {
        self.task.queries.len().min(QUERIES)
    }

    fn panels(self) -> usize {
        self.count().div_ceil(WIDTH)
    }

    /// The queries of a panel.
    #[inline(always)]
    fn queries(self, panel: usize) -> Range<usize> {
        let start = self.task.queries.start + panel * WIDTH;
        start..self.task.queries.end.min(start + WIDTH)
    }

    /// Widens the queries and puts them across. Rows past the sequence's length are zeros.
    #[inline(always)]
    fn pack_queries<S: Simd>(self, simd: S, block: &mut Block<'_>) {
        let (attention, sequence, task) = (self.attention, self.sequence, self.task);
        let vectors = attention.vectors();
        // The key tile is not in use yet.
        let wide = &mut block.keys[..WIDTH * vectors];
        let rows = sequence.geometry.q_len() as usize;
        for panel in 0..self.panels() {
            for lane in 0..WIDTH {
                let query = task.queries.start + panel * WIDTH + lane;
                let (row, head) = attention.place(task.kv_head, query);
                let wide = &mut wide[lane * vectors..][..vectors];
                if query < task.queries.end && row < rows {
                    attention.read_query(simd, sequence, (row, head), wide, 1);
                } else {
                    wide.fill([0.0; WIDTH]);
                }
            }
            let panel = &mut block.queries[panel * vectors * WIDTH..][..vectors * WIDTH];
            for (i, across) in panel.as_chunks_mut::<WIDTH>().0.iter_mut().enumerate() {
                let mut block = [[0.0; WIDTH]; WIDTH];
                for (lane, row) in block.iter_mut().enumerate() {
                    *row = wide[lane * vectors + i];
                }
                *across = simd.across(&block);
            }
        }
    }

    /// Computes all tiles that are visible.
    #[inline(always)]
    fn pass<S: Simd>(self, simd: S, block: &mut Block<'_>, with_care: bool) {
        let (sequence, keys) = (self.sequence, &self.task.keys);
        let rows = self.attention.rows(&self.task.queries);
        let mut first = keys.start;
        while first < keys.end {
            let many = first as u64..keys.end.min(first + STRIDE * KEYS) as u64;
            if sequence.geometry.tile(rows.clone(), many.clone()) == Tile::None {
                first = many.end as usize;
                continue;
            }
            let tile = first..keys.end.min(first + KEYS);
            first = tile.end;
            let seen = self.look(&tile, block);
            if !seen.is_empty() {
                let finite = self.fetch(simd, &tile, seen, block, with_care);
                let next = first..keys.end.min(first + KEYS);
                self.request::<S>(next, &mut block.requests);
                self.meet(simd, tile.start, block, finite || !with_care);
            }
        }
    }

    /// Finds what each slab sees of a tile. Gives the keys that any sees.
    #[inline(always)]
    fn look(self, tile: &Range<usize>, block: &mut Block<'_>) -> Range<usize> {
        let (attention, sequence) = (self.attention, self.sequence);
        let group = attention.group;
        let mut all = 0..0;
        for panel in 0..self.panels() {
            let queries = self.queries(panel);
            let rows = attention.rows(&queries);
            let lanes = |row: u64| {
                // The queries of a row that are the panel's.
                let first = (row as usize * group).max(queries.start) - queries.start;
                let end = ((row as usize + 1) * group).min(queries.end) - queries.start;
                ((1u32 << end) - (1u32 << first)) as u16
            };
            let of = (tile, self.task.keys.end);
            let ahead = &mut block.ahead[panel];
            let (sight, panel) = (&mut block.sights[panel / PANELS], panel % PANELS);
            let hidden = &mut sight.hidden[panel];
            (sight.keys[panel], sight.mixed[panel]) =
                look(attention, sequence, rows, of, lanes, ahead, hidden);
            all = union(&[all, sight.keys[panel].clone()]);
        }
        all
    }

    /// Fetches the keys `seen` of a tile, and their values. With care, says whether these are finite.
    #[inline(always)]
    fn fetch<S: Simd>(
        self,
        simd: S,
        tile: &Range<usize>,
        seen: Range<usize>,
        block: &mut Block<'_>,
        with_care: bool,
    ) -> bool {
        let fetch = Fetch {
            attention: self.attention,
            sequence: self.sequence,
            kv_head: self.task.kv_head,
            rows: tile.start + seen.start..tile.start + seen.end,
            with_care,
        };
        let keys = Places::Tile {
            tile: &mut *block.keys,
            first: seen.start,
            row: &mut *block.row,
        };
        let finite = fetch.keys(simd, keys);
        if self.shares {
            return finite;
        }
        let values = Places::Tile {
            tile: &mut *block.values,
            first: seen.start,
            row: &mut *block.row,
        };
        fetch.values(simd, values)
    }

    /// Lets the rows of the next tile be asked for.
    fn request<S: Simd>(self, next: Range<usize>, requests: &mut Requests) {
        let (of, head) = (&self.sequence.keys, self.task.kv_head);
        requests.clear();
        of.request(&of.key, head, &next, requests);
        if !self.shares {
            of.request(&of.value, head, &next, requests);
        }
        let steps = products::steps::<S>(self.attention.vectors(), self.attention.columns());
        requests.spread(self.panels().div_ceil(PANELS) * steps);
    }

    /// One slab after the other meets the tile whose first key is `first`.
    #[inline(always)]
    fn meet<S: Simd>(self, simd: S, first: usize, block: &mut Block<'_>, finite: bool) {
        let attention = self.attention;
        let (vectors, columns) = (attention.vectors(), attention.columns());
        let values = if self.shares {
            &*block.keys
        } else {
            &*block.values
        };
        let panels = self.panels();
        for (number, sight) in block.sights[..panels.div_ceil(PANELS)].iter().enumerate() {
            let first_panel = number * PANELS;
            let seen = &sight.keys[..(panels - first_panel).min(PANELS)];
            let all = union(seen);
            if all.is_empty() {
                continue;
            }
            // Vectors of a panel, one for each element of a query.
            let of_panel = vectors * WIDTH;
            let mut slab = Slab {
                queries: &block.queries[first_panel * of_panel..][..PANELS * of_panel],
                keys: block.keys,
                values,
                scores: block.scores,
                out: &mut block.out[number * LANES * columns..][..LANES * columns],
                columns,
                max: &mut block.max[first_panel..][..PANELS],
                sum: &mut block.sum[first_panel..][..PANELS],
                decay: [[1.0; WIDTH]; PANELS],
                requests: &mut block.requests,
            };
            simd.apart(Score {
                slab: &mut slab,
                vectors,
                seen,
            });
            for (panel, seen) in seen.iter().enumerate() {
                if attention.scale != 1.0 || attention.bias.is_some() {
                    let queries = self.queries(first_panel + panel);
                    self.bias(simd, &mut slab, (panel, queries, seen), first);
                }
                simd.apart(Soften {
                    attention,
                    slab: &mut slab,
                    panel,
                    seen,
                    hidden: sight.mixed[panel].then_some(&sight.hidden[panel]),
                    all: &all,
                });
            }
            simd.apart(Weigh {
                slab: &mut slab,
                count: (self.count() - number * LANES).min(LANES),
                seen,
                finite,
            });
        }
    }

    /// Scales the scores of a panel where the queries are not, and adds the position bias. Keys count from `first`.
    #[inline(always)]
    fn bias<S: Simd>(
        self,
        simd: S,
        slab: &mut Slab<'_>,
        (panel, queries, seen): (usize, Range<usize>, &Range<usize>),
        first: usize,
    ) {
        let (attention, sequence) = (self.attention, self.sequence);
        let keys = first + seen.start..first + seen.end;
        let scores = &mut slab.scores[seen.start * PANELS..seen.end * PANELS];
        for score in scores.iter_mut().skip(panel).step_by(PANELS) {
            for score in score {
                *score *= attention.scale;
            }
        }
        for (lane, query) in queries.enumerate() {
            let place = attention.place(self.task.kv_head, query);
            if place.0 as u64 >= sequence.geometry.q_len() {
                break;
            }
            let mut bias = [[0.0; WIDTH]; KEYS / WIDTH];
            if !read_bias(simd, attention, sequence, place, &keys, &mut bias) {
                break;
            }
            let scores = scores.iter_mut().skip(panel).step_by(PANELS);
            for (score, bias) in scores.zip(bias.as_flattened()) {
                score[lane] += bias;
            }
        }
    }
}

/// Scores of a panel to weights: hides, moves the running maximum, takes powers, adds them up and rounds them.
struct Soften<'a, 's> {
    attention: &'a Attention,
    slab: &'a mut Slab<'s>,
    panel: usize,
    /// The keys that the panel sees.
    seen: &'a Range<usize>,
    /// Which queries do not see which of them.
    hidden: Option<&'a Hidden>,
    /// The keys that the slab sees. Weights of those that the panel does not see are 0.
    all: &'a Range<usize>,
}

impl Kernel for Soften<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Soften {
            attention,
            slab,
            panel,
            seen,
            hidden,
            all,
        } = self;
        let Range { start, end } = *seen;
        if start == end {
            for scores in slab.scores[all.start * PANELS..all.end * PANELS].chunks_exact_mut(PANELS)
            {
                scores[panel] = [0.0; WIDTH];
            }
            slab.decay[panel] = [1.0; WIDTH];
            return;
        }
        for unseen in [all.start..start, end..all.end] {
            let scores = &mut slab.scores[unseen.start * PANELS..unseen.end * PANELS];
            for scores in scores.chunks_exact_mut(PANELS) {
                scores[panel] = [0.0; WIDTH];
            }
        }
        let scores = &mut slab.scores[start * PANELS..end * PANELS];
        let old = simd.load(&slab.max[panel]);
        // NaN is no maximum; it reaches the sum and the output through its power.
        let mut most = [old; 4];
        if let Some(hidden) = hidden {
            let scores = scores.chunks_exact_mut(PANELS);
            for (scores, &lanes) in scores.zip(&hidden[start..end]) {
                let score = simd.hide(simd.load(&scores[panel]), lanes);
                simd.store(score, &mut scores[panel]);
                most[0] = simd.larger(score, most[0]);
            }
        } else {
            // Four at a time, since each waits for the one before.
            let fours = scores.chunks_exact(4 * PANELS);
            for scores in fours.remainder().chunks_exact(PANELS) {
                most[0] = simd.larger(simd.load(&scores[panel]), most[0]);
            }
            for four in fours {
                for i in 0..4 {
                    most[i] = simd.larger(simd.load(&four[i * PANELS + panel]), most[i]);
                }
            }
        }
        let max = simd.larger(simd.larger(most[0], most[1]), simd.larger(most[2], most[3]));
        // Before anything is seen the maximum is -inf; the difference to it must not be NaN.
        let shift = simd.larger(max, simd.splat(f32::MIN));
        let decay = exp2(simd, simd.subtract(old, shift));
        let sum = weights::<S, PANELS>(simd, attention, scores, panel, shift);
        let sum = simd.mul_add(simd.load(&slab.sum[panel]), decay, sum);
        simd.store(sum, &mut slab.sum[panel]);
        simd.store(max, &mut slab.max[panel]);
        simd.store(decay, &mut slab.decay[panel]);
    }
}
