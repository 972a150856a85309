//! The online softmax of the prefill kernel: from the scores of a KV tile to weights, running maximum and running sum.
//!
//! A lane group is updated at once: a vector holds one key's scores of its 16 queries (Milakov and Gimelshein 2018,
//! with one recurrence in each lane).

use super::LANE_GROUPS;
use super::buffers::QueryTile;
use crate::kernel::attention::Attention;
use crate::kernel::online_softmax::exp2;
use crate::kernel::online_softmax::weights;
use crate::kernel::simd::{Kernel, Simd, WIDTH};
use crate::kernel::visibility::HiddenLanes;
use std::ops::Range;

/// Updates the online softmax of a lane group: hides scores, raises the running maximum, replaces the scores by their
/// rounded weights and adds these to the running sum.
pub(super) struct UpdateSoftmax<'a, 's> {
    pub(super) attention: &'a Attention,
    pub(super) query_tile: &'a mut QueryTile<'s>,
    pub(super) lane_group: usize,
    /// The keys that the lane group sees.
    pub(super) visible: &'a Range<usize>,
    /// The queries that each key is hidden from; `None` if every query sees all of `visible`.
    pub(super) hidden: Option<&'a HiddenLanes>,
    /// The keys that the query tile sees. Those that the lane group does not see get the weight 0.
    pub(super) all: &'a Range<usize>,
}

impl Kernel for UpdateSoftmax<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let UpdateSoftmax { attention, query_tile, lane_group, visible, hidden, all } = self;
        let Range { start, end } = *visible;
        if start == end {
            for scores in
                query_tile.scores[all.start * LANE_GROUPS..all.end * LANE_GROUPS].chunks_exact_mut(LANE_GROUPS)
            {
                scores[lane_group] = [0.0; WIDTH];
            }
            query_tile.rescale[lane_group] = [1.0; WIDTH];
            return;
        }
        for unseen in [all.start..start, end..all.end] {
            let scores = &mut query_tile.scores[unseen.start * LANE_GROUPS..unseen.end * LANE_GROUPS];
            for scores in scores.chunks_exact_mut(LANE_GROUPS) {
                scores[lane_group] = [0.0; WIDTH];
            }
        }
        let scores = &mut query_tile.scores[start * LANE_GROUPS..end * LANE_GROUPS];
        let old = simd.load(&query_tile.max[lane_group]);
        // A NaN does not become the maximum; it reaches sum and output through its weight.
        let mut most = [old; 4];
        if let Some(hidden) = hidden {
            let scores = scores.chunks_exact_mut(LANE_GROUPS);
            for (scores, &lanes) in scores.zip(&hidden[start..end]) {
                let score = simd.hide(simd.load(&scores[lane_group]), lanes);
                simd.store(score, &mut scores[lane_group]);
                most[0] = simd.larger(score, most[0]);
            }
        } else {
            // Four independent maxima, since each step of one waits for the step before.
            let fours = scores.chunks_exact(4 * LANE_GROUPS);
            for scores in fours.remainder().chunks_exact(LANE_GROUPS) {
                most[0] = simd.larger(simd.load(&scores[lane_group]), most[0]);
            }
            for four in fours {
                for i in 0..4 {
                    most[i] = simd.larger(simd.load(&four[i * LANE_GROUPS + lane_group]), most[i]);
                }
            }
        }
        let max = simd.larger(simd.larger(most[0], most[1]), simd.larger(most[2], most[3]));
        // The maximum is -inf until a key is seen; the difference to it must not be NaN.
        let shift = simd.larger(max, simd.splat(f32::MIN));
        let rescale = exp2(simd, simd.subtract(old, shift));
        let sum = weights::<S, LANE_GROUPS>(simd, attention, scores, lane_group, shift);
        let sum = simd.mul_add(simd.load(&query_tile.sum[lane_group]), rescale, sum);
        simd.store(sum, &mut query_tile.sum[lane_group]);
        simd.store(max, &mut query_tile.max[lane_group]);
        simd.store(rescale, &mut query_tile.rescale[lane_group]);
    }
}
