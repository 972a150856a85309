//! TriangleMix by calls of the stock operator: no mask of the prompt's size, no kernel of its own.

use std::ops::Range;

use ascend_spec::Layout;
use ascend_spec::geometry::{TriangleMix, TrianglePart, TriangleRows};

use crate::attention::{Output, Plan};
use crate::error::{Error, Result};
use crate::mask::{CausalOrigin, Mask};
use crate::memory::Element;
use crate::merge::{MergePlan, MergeState, Part};
use crate::runtime::Stream;
use crate::tensor::Tensor;

use super::backend::{AttentionShape, count};

/// When leaving keys out is worth the additional calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TriangleGate {
    /// Fewest rows that leave keys out.
    pub min_sparse_rows: u64,
    /// Fewest pairs of row and key left out.
    pub min_saved_pairs: u128,
}

impl TriangleGate {
    /// As measured by a port to the 910B3 with heads of 128 elements: below, dense attention is faster.
    pub const MEASURED: Self = Self {
        min_sparse_rows: 128,
        min_saved_pairs: 913_152,
    };

    /// Whatever it costs.
    pub const ALWAYS: Self = Self {
        min_sparse_rows: 1,
        min_saved_pairs: 1,
    };
}

/// Prefill of one prompt, or of a chunk of it, in a layer with TriangleMix.
///
/// With `S = sinks + window + 1`, `N` the length of the whole prompt and `E = N - last`, the rows are computed so:
///
/// | rows | calls |
/// |---|---|
/// | before `S`: nothing is left out | causal |
/// | `S..E` | a band over the last keys and a call over the sinks, merged by their log-sum-exps |
/// | from `E` on: dense | causal |
///
/// The two parts of the middle rows are disjoint, for row `S` is the first whose window begins behind the sinks. All masks
/// are the compressed one. Keys and values are dense: those of the prompt up to the last row, packed.
///
/// It is dense attention while the prompt's length is not known, for single rows (decoding), and where the
/// [`TriangleGate`] says so.
#[derive(Clone, Copy, Debug)]
pub struct TrianglePrefill {
    /// The heads.
    pub shape: AttentionShape,
    /// Sinks, window and last rows.
    pub sizes: TriangleMix,
    /// When to leave keys out.
    pub gate: TriangleGate,
}

/// Rows that one call computes, or two that are merged.
#[derive(Debug)]
struct Segment {
    rows: Range<usize>,
    keys: Range<usize>,
    plan: Plan,
    /// What middle rows see besides their window.
    sinks: Option<Box<Sinks>>,
}

#[derive(Debug)]
struct Sinks {
    keys: Range<usize>,
    plan: Plan,
    merge: MergePlan,
}

/// A prefill that was prepared. From [`TrianglePrefill::plan`].
#[derive(Debug)]
pub struct TrianglePlan {
    segments: Vec<Segment>,
    shape: [usize; 3],
    saved_pairs: u128,
}

impl TrianglePrefill {
    /// Prepares the prefill of the rows from `first_row` on: query `[rows, N, D]`, key and value
    /// `[first_row + rows, Nkv, D]`, BF16. One plan serves all layers with TriangleMix.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another number of keys than rows up to the last; as for
    /// [`FusedInferAttention::plan`](crate::FusedInferAttention::plan) and [`MergeState::plan`].
    pub fn plan<T: Element>(
        &self,
        stream: &Stream,
        (first_row, prompt_len): (u64, Option<u64>),
        query: &Tensor<T>,
        key: &Tensor<T>,
        value: &Tensor<T>,
    ) -> Result<TrianglePlan> {
        let &[rows, heads, dim] = query.shape() else {
            return Err(Error::invalid("query", query.desc(), "[rows, N, D]"));
        };
        let size = |dim: i64| usize::try_from(dim).unwrap_or(0);
        let shape = [size(rows), size(heads), size(dim)];
        let of = TriangleRows {
            first_row,
            rows: rows.unsigned_abs(),
            // Without a length, no row is known to lie before the last ones.
            prompt_len: prompt_len.unwrap_or(0),
        };
        let keys = key.shape().first().copied().unwrap_or(0);
        if u64::try_from(keys) != Ok(of.keys()) {
            return Err(Error::invalid(
                "key",
                format_args!("{keys} keys"),
                format_args!("{}, the rows before the chunk and its own", of.keys()),
            ));
        }
        let middle = self.middle(of);
        let saved_pairs = match &middle {
            Some(_) => self.sizes.geometry(TrianglePart::Middle, of).visible(),
            None => 0,
        };
        let first = usize::try_from(first_row).unwrap_or(usize::MAX);
        let parts = Parts {
            of: self,
            stream,
            first,
            tensors: [query, key, value],
        };
        let all = 0..shape[0];
        let segments = match middle {
            None => vec![parts.causal(all)?],
            Some(middle) => {
                let before = 0..middle.start;
                let behind = middle.end..all.end;
                let mut segments = Vec::new();
                if !before.is_empty() {
                    segments.push(parts.causal(before)?);
                }
                segments.push(parts.middle(middle)?);
                if !behind.is_empty() {
                    segments.push(parts.causal(behind)?);
                }
                segments
            }
        };
        Ok(TrianglePlan {
            segments,
            shape,
            saved_pairs,
        })
    }

    /// The rows of the chunk that leave keys out, if it is worth it.
    fn middle(&self, of: TriangleRows) -> Option<Range<usize>> {
        if of.rows <= 1 {
            return None;
        }
        let first = self.sizes.first_sparse_row(of.prompt_len)?;
        let place = |row: u64| row.saturating_sub(of.first_row).min(of.rows);
        let (start, end) = (
            place(first),
            place(self.sizes.first_last_row(of.prompt_len)),
        );
        let worth = end.saturating_sub(start) >= self.gate.min_sparse_rows.max(1)
            && self.sizes.geometry(TrianglePart::Middle, of).visible() >= self.gate.min_saved_pairs;
        match worth {
            true => Some(usize::try_from(start).ok()?..usize::try_from(end).ok()?),
            false => None,
        }
    }
}

/// What the calls of a prefill are made of. Rows are counted in the chunk, keys in the prompt.
struct Parts<'a, T: Element> {
    of: &'a TrianglePrefill,
    stream: &'a Stream,
    first: usize,
    tensors: [&'a Tensor<T>; 3],
}

impl<T: Element> Parts<'_, T> {
    fn call(
        &self,
        mask: Mask,
        rows: &Range<usize>,
        keys: &Range<usize>,
        lse: bool,
    ) -> Result<Plan> {
        let [query, key, value] = self.tensors;
        let (query, key, value) = (
            query.narrow(0, rows.clone())?,
            key.narrow(0, keys.clone())?,
            value.narrow(0, keys.clone())?,
        );
        let call = self.of.shape.call(Layout::Tnd);
        call.mask(mask)
            .actual_seq_lengths([count(rows.len())])
            .actual_seq_lengths_kv([count(keys.len())])
            .softmax_lse(lse)
            .plan(&query, &key, &value)
    }

    fn causal(&self, rows: Range<usize>) -> Result<Segment> {
        let masks = self.stream.device().masks();
        let keys = 0..self.first + rows.end;
        let plan = self.call(masks.causal(CausalOrigin::RightDown)?, &rows, &keys, false)?;
        Ok(Segment {
            rows,
            keys,
            plan,
            sinks: None,
        })
    }

    /// Rows whose window begins behind the sinks. The last row stands at the last key, so that the band is the window.
    fn middle(&self, rows: Range<usize>) -> Result<Segment> {
        let sizes = self.of.sizes;
        let window = usize::try_from(sizes.sliding_window_size).unwrap_or(usize::MAX);
        let sinks = usize::try_from(sizes.num_sink_tokens).unwrap_or(usize::MAX);
        let first_key = (self.first + rows.start).saturating_sub(window);
        let (keys, sinks) = (first_key..self.first + rows.end, 0..sinks);
        let masks = self.stream.device().masks();
        let merged = !sinks.is_empty();
        let plan = self.call(masks.band(count(window), 0)?, &rows, &keys, merged)?;
        let sinks = match merged {
            false => None,
            true => {
                let far = self.call(Mask::none(), &rows, &sinks, true)?;
                let (near_out, far_out): (Output<T>, Output<T>) = (plan.output()?, far.output()?);
                let parts = [Part::of(&near_out)?, Part::of(&far_out)?];
                Some(Box::new(Sinks {
                    keys: sinks,
                    plan: far,
                    merge: MergeState::new(Layout::Tnd).plan(&parts)?,
                }))
            }
        };
        Ok(Segment {
            rows,
            keys,
            plan,
            sinks,
        })
    }
}

impl TrianglePlan {
    /// Whether nothing is left out.
    pub fn is_dense(&self) -> bool {
        self.saved_pairs == 0
    }

    /// Pairs of row and key that are left out, for each head.
    pub fn saved_pairs(&self) -> u128 {
        self.saved_pairs
    }

    /// Queues the prefill of a layer: the attention `[rows, N, D]`. Returns at once.
    ///
    /// # Errors
    /// As for [`Plan::launch_into`] and [`MergePlan::launch_into`].
    pub fn launch<T: Element>(
        &self,
        stream: &Stream,
        query: &Tensor<T>,
        key: &Tensor<T>,
        value: &Tensor<T>,
    ) -> Result<Tensor<T>> {
        let out = Tensor::<T>::empty(stream.device(), self.shape)?;
        let part = |rows: &Range<usize>, keys: &Range<usize>| -> Result<[Tensor<T>; 3]> {
            Ok([
                query.narrow(0, rows.clone())?,
                key.narrow(0, keys.clone())?,
                value.narrow(0, keys.clone())?,
            ])
        };
        for Segment {
            rows,
            keys,
            plan,
            sinks,
        } in &self.segments
        {
            let attention = out.narrow(0, rows.clone())?;
            let [q, k, v] = part(rows, keys)?;
            let Some(sinks) = sinks else {
                let mut output = Output {
                    attention,
                    softmax_lse: None,
                };
                plan.launch_into(stream, &q, &k, &v, &mut output)?;
                continue;
            };
            let near = plan.launch(stream, &q, &k, &v)?;
            let [q, k, v] = part(rows, &sinks.keys)?;
            let far = sinks.plan.launch(stream, &q, &k, &v)?;
            let mut both = sinks.merge.output()?;
            both.attention = attention;
            let parts = [Part::of(&near)?, Part::of(&far)?];
            sinks.merge.launch_into(stream, &parts, &mut both)?;
        }
        Ok(out)
    }
}
