//! A call as the kernels see it: sequences, tensors by row, and the numbering of queries.

use super::Buffers;
use super::element::Element;
use super::tensors::{MaskBytes, Sink, Sizes, Source};
use ascend_spec::MaskGeometry;
use ascend_spec::fia::{MaskUse, Problem, Work};
use std::ops::Range;
use std::ptr;

/// One call. A *query* is one row of one head; the queries that share a key head are numbered row by row, and within
/// a row head by head, so that neighbours see nearly the same keys.
#[derive(Debug)]
pub(super) struct Attention<T> {
    pub(super) sequences: Vec<Sequence<T>>,
    pub(super) kv_heads: usize,
    /// Query heads that share a key head.
    pub(super) group: usize,
    pub(super) query_rows: usize,
    pub(super) scale: f32,
    pub(super) query: Source<T>,
    pub(super) out: Sink<T>,
    pub(super) lse: Option<Sink<f32>>,
    pub(super) mask: Option<MaskBytes>,
    /// Whether a row that the mask tensor leaves without keys comes out as 0.
    pub(super) corrects_blind_rows: bool,
}

/// One entry of the batch.
#[derive(Debug)]
pub(super) struct Sequence<T> {
    /// Visible keys of each row, before the mask tensor.
    pub(super) geometry: MaskGeometry,
    /// Key tensor, and the entry's place on its batch axis.
    pub(super) key: Source<T>,
    /// Value tensor; the place is the key's.
    pub(super) value: Source<T>,
    pub(super) kv_batch: usize,
}

impl<T: Element> Attention<T> {
    /// # Safety
    ///
    /// As for [`super::run`], for as long as the value is used; the tensors hold elements of type `T`.
    pub(super) unsafe fn new(problem: &Problem<'_>, buffers: &Buffers<'_>) -> Self {
        let sizes = |heads, rows, dim| Sizes {
            batch: problem.batch,
            heads,
            rows,
            dim,
        };
        let query = sizes(problem.heads, problem.query_rows, problem.head_dim);
        let out = sizes(problem.heads, problem.query_rows, problem.value_dim);
        // Where there are no keys their heads do not count, and no rule has looked at them.
        let group = match problem.work {
            Work::Attend => problem.group().max(1),
            Work::Fill | Work::Nothing => 1,
        };
        let longest = (0..problem.batch)
            .map(|b| problem.kv_len(b))
            .max()
            .unwrap_or(0);
        Attention {
            // SAFETY: the problem touches the key rows of each sequence.
            sequences: (0..problem.batch)
                .map(|b| unsafe { Sequence::new(problem, buffers, b) })
                .collect(),
            kv_heads: problem.heads / group,
            group,
            query_rows: problem.query_rows,
            scale: problem.scale() as f32,
            // SAFETY: the problem touches all of the query.
            query: unsafe { Source::new(buffers.query, problem.query, query) },
            // SAFETY: the problem touches all of the output, and nobody else does.
            out: unsafe { Sink::new(buffers.attention_out, problem.out, out) },
            lse: problem.lse.map(|view| {
                let lse = Sizes { dim: 1, ..out };
                // SAFETY: the problem touches all of the log-sum-exp, and nobody else does.
                unsafe { Sink::new(buffers.softmax_lse, view, lse) }
            }),
            mask: match problem.mask {
                MaskUse::None | MaskUse::Compressed => None,
                // SAFETY: the problem touches the mask, which covers every row and every valid key.
                MaskUse::Full(at) => Some(unsafe {
                    let (batch, rows) = (problem.batch, problem.query_rows);
                    MaskBytes::new(buffers.atten_mask, at, batch, rows, longest)
                }),
            },
            corrects_blind_rows: problem.corrects_blind_rows(),
        }
    }

    /// Number of queries that share a key head.
    pub(super) fn queries(&self) -> usize {
        self.query_rows * self.group
    }

    /// Row and head of a query.
    #[inline(always)]
    pub(super) fn place(&self, kv_head: usize, query: usize) -> (usize, usize) {
        (
            query / self.group,
            kv_head * self.group + query % self.group,
        )
    }

    /// The rows that a range of queries, not empty, belongs to.
    #[inline(always)]
    pub(super) fn rows(&self, queries: &Range<usize>) -> Range<u64> {
        let end = queries.end.div_ceil(self.group);
        (queries.start / self.group) as u64..end as u64
    }
}

impl<T: Element> Sequence<T> {
    /// # Safety
    ///
    /// As for [`Attention::new`].
    unsafe fn new(problem: &Problem<'_>, buffers: &Buffers<'_>, b: usize) -> Self {
        let of = |list: &[*const u8], index: usize| list.get(index).copied();
        let at = problem
            .key_value(b)
            .filter(|_| problem.work == Work::Attend);
        let bases = at.and_then(|at| {
            let (key, value) = (buffers.key, buffers.value);
            Some((at, of(key, at.list_index)?, of(value, at.list_index)?))
        });
        let sizes = |batch, rows, dim| Sizes {
            batch,
            heads: problem.kv_heads,
            rows,
            dim,
        };
        if let Some((at, key, value)) = bases {
            let rows = problem.kv_len(b);
            let (keys, values) = (problem.head_dim, problem.value_dim);
            Sequence {
                geometry: problem.geometry(b),
                // SAFETY: the problem touches at least the valid rows of the key, up to this batch entry.
                key: unsafe { Source::new(key, at.key, sizes(at.batch + 1, rows, keys)) },
                // SAFETY: the same of the value.
                value: unsafe { Source::new(value, at.value, sizes(at.batch + 1, rows, values)) },
                kv_batch: at.batch,
            }
        } else {
            let (keys, values) = (problem.head_dim, problem.value_dim);
            Sequence {
                geometry: MaskGeometry::full(problem.q_len(b) as u64, 0),
                // SAFETY: there are no rows.
                key: unsafe { Source::new(ptr::null(), problem.query, sizes(0, 0, keys)) },
                // SAFETY: there are no rows.
                value: unsafe { Source::new(ptr::null(), problem.query, sizes(0, 0, values)) },
                kv_batch: 0,
            }
        }
    }

    /// The keys, of `within`, that any of `rows` sees.
    #[inline(always)]
    pub(super) fn span(&self, rows: Range<u64>, within: &Range<usize>) -> Range<usize> {
        let span = self.geometry.span(rows);
        // Both ends are at most the key length, a usize.
        let (start, end) = (span.start as usize, span.end as usize);
        let (start, end) = (start.max(within.start), end.min(within.end));
        start..end.max(start)
    }
}
