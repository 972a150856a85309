//! TriangleMix: which part of the causal triangle a prefill layer leaves out.

use super::region::Region;
use super::sparse_mode::{FAR, clamp_len};
use super::{MaskGeometry, Runs};

/// Sizes of TriangleMix, a sparse prefill that needs no training: shallow layers attend densely, deep layers leave
/// out the *middle* of the causal triangle.
///
/// With row `q` and key `j <= q` counted from 0 and a prompt of `N` tokens:
///
/// | part | keys |
/// |---|---|
/// | streaming | `j < num_sink_tokens`, or `q - j <= sliding_window_size` |
/// | last | not streaming, `q >= N - num_last_tokens` |
/// | middle | not streaming, `q < N - num_last_tokens`: what is left out |
///
/// The three parts are disjoint and make up the triangle. A row's window has `sliding_window_size + 1` keys, its own
/// among them, and the first row that leaves out a key is `num_sink_tokens + sliding_window_size + 1`. `N` is the
/// length of the whole prompt, also while a chunk of it is computed.
///
/// Source: arXiv 2507.21526, whose indices count from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TriangleMix {
    /// Keys at the start of the prompt that every row sees.
    pub num_sink_tokens: u64,
    /// Keys before its own that a row sees.
    pub sliding_window_size: u64,
    /// Rows at the end of the prompt that see every key up to their own.
    pub num_last_tokens: u64,
}

/// Parts of the causal triangle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TrianglePart {
    /// Sinks and window.
    Streaming,
    /// The keys outside of sinks and window that the last rows see.
    Last,
    /// The keys outside of sinks and window that the other rows could see.
    Middle,
    /// Streaming and last: what a deep layer sees.
    Triangle,
    /// All three: what a shallow layer sees.
    Dense,
}

impl TrianglePart {
    /// Every part.
    pub const ALL: [TrianglePart; 5] = [
        TrianglePart::Streaming,
        TrianglePart::Last,
        TrianglePart::Middle,
        TrianglePart::Triangle,
        TrianglePart::Dense,
    ];
}

/// Rows of a prompt that one call computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TriangleRows {
    /// Position of the first row in the prompt; the keys before it are already in the cache.
    pub first_row: u64,
    /// Number of rows.
    pub rows: u64,
    /// Length of the whole prompt.
    pub prompt_len: u64,
}

impl TriangleRows {
    /// The rows of a prompt that is computed in one call.
    pub const fn whole(prompt_len: u64) -> Self {
        TriangleRows { first_row: 0, rows: prompt_len, prompt_len }
    }

    /// Number of keys in the cache: those before the first row and one for each row.
    pub const fn keys(&self) -> u64 {
        self.first_row.saturating_add(self.rows)
    }
}

impl TriangleMix {
    /// The paper's sizes.
    pub const PAPER: Self = Self::new(8, 512, 128);
    /// The sizes of unpublished notes on Qwen3, which give no measurement.
    pub const GUIDE: Self = Self::guide(4, 32);
    /// The sizes of [`TriangleMix::GUIDE`]'s source for long contexts.
    pub const GUIDE_LONG_CONTEXT: Self = Self::guide(8, 64);
    /// The sizes with which the paper measures how much each part contributes.
    pub const PROBE: Self = Self::new(64, 128, 128);

    /// TriangleMix with these numbers of sinks, window keys before a row's own, and last rows.
    pub const fn new(num_sink_tokens: u64, sliding_window_size: u64, num_last_tokens: u64) -> Self {
        TriangleMix { num_sink_tokens, sliding_window_size, num_last_tokens }
    }

    /// Sizes by the rule of [`TriangleMix::GUIDE`]'s source: twice as many last rows as window keys before a row's own.
    /// It gives no measurement.
    pub const fn guide(num_sink_tokens: u64, sliding_window_size: u64) -> Self {
        Self::new(num_sink_tokens, sliding_window_size, sliding_window_size.saturating_mul(2))
    }

    /// First row of a prompt that leaves out a key, if any row does.
    pub fn first_sparse_row(&self, prompt_len: u64) -> Option<u64> {
        let first = self.num_sink_tokens.saturating_add(self.sliding_window_size).saturating_add(1);
        (first < self.first_last_row(prompt_len)).then_some(first)
    }

    /// Whether any of these rows leaves out a key.
    pub fn leaves_out(&self, chunk: TriangleRows) -> bool {
        let first = self.first_sparse_row(chunk.prompt_len);
        first.is_some_and(|first| {
            let end = chunk.keys().min(self.first_last_row(chunk.prompt_len));
            first.max(chunk.first_row) < end
        })
    }

    /// First of the last rows.
    pub fn first_last_row(&self, prompt_len: u64) -> u64 {
        prompt_len.saturating_sub(self.num_last_tokens)
    }

    /// The keys of a part that rows of a prompt see.
    pub fn geometry(&self, part: TrianglePart, chunk: TriangleRows) -> MaskGeometry {
        let start = clamp_len(chunk.first_row);
        let sinks = clamp_len(self.num_sink_tokens);
        let window = clamp_len(self.sliding_window_size);
        let last = clamp_len(self.first_last_row(chunk.prompt_len)) - start;
        MaskGeometry::of(chunk.rows, chunk.keys(), |all| {
            let near = Region { low: start - window, high: start, ..all };
            let far = Region { low: -FAR, high: start - window - 1, ..all };
            let sink = Region { keys: (0, sinks), ..far };
            let rest = Region { keys: (sinks, all.keys.1), ..far };
            let last_rows = Region { rows: (last.max(0), all.rows.1), ..rest };
            let middle_rows = Region { rows: (0, last), ..rest };
            const NO: Region = Region::NOTHING;
            let parts: [Region; Runs::MAX] = match part {
                TrianglePart::Streaming => [near, sink, NO],
                TrianglePart::Last => [last_rows, NO, NO],
                TrianglePart::Middle => [middle_rows, NO, NO],
                TrianglePart::Triangle => [near, sink, last_rows],
                TrianglePart::Dense => [Region { high: start, ..all }, NO, NO],
            };
            parts
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition.
    fn sees(mix: &TriangleMix, part: TrianglePart, n: u64, q: u64, j: u64) -> bool {
        let streaming = j < mix.num_sink_tokens || q.wrapping_sub(j) <= mix.sliding_window_size;
        let last = q + mix.num_last_tokens >= n;
        j <= q
            && match part {
                TrianglePart::Streaming => streaming,
                TrianglePart::Last => !streaming && last,
                TrianglePart::Middle => !streaming && !last,
                TrianglePart::Triangle => streaming || last,
                TrianglePart::Dense => true,
            }
    }

    proptest! {
        #[test]
        fn parts_follow_the_definition_in_every_chunk(
            sizes in (0u64..6, 0u64..6, 0u64..8), n in 0u64..24, cuts in (0u64..24, 0u64..24),
        ) {
            let mix = TriangleMix::new(sizes.0, sizes.1, sizes.2);
            let (a, b) = (cuts.0.min(n), cuts.1.min(n));
            let (first_row, end) = (a.min(b), a.max(b));
            let rows = TriangleRows { first_row, rows: end - first_row, prompt_len: n };
            for part in TrianglePart::ALL {
                let geometry = mix.geometry(part, rows);
                prop_assert_eq!(geometry.kv_len(), end);
                for i in 0..rows.rows {
                    for j in 0..n {
                        let want = j < end && sees(&mix, part, n, first_row + i, j);
                        prop_assert_eq!(geometry.sees(i, j), want, "{:?} {} {}", part, i, j);
                    }
                }
            }
            let count = |part| mix.geometry(part, rows).visible();
            prop_assert_eq!(mix.leaves_out(rows), count(TrianglePart::Middle) > 0);
            prop_assert_eq!(
                count(TrianglePart::Streaming) + count(TrianglePart::Last) + count(TrianglePart::Middle),
                count(TrianglePart::Dense)
            );
        }

        #[test]
        fn the_first_sparse_row_and_the_saving_are_as_computed(
            sizes in (0u64..6, 0u64..6, 0u64..8), n in 0u64..40,
        ) {
            let mix = TriangleMix::new(sizes.0, sizes.1, sizes.2);
            let middle = mix.geometry(TrianglePart::Middle, TriangleRows::whole(n));
            let first = (0..n).find(|&q| !middle.row(q).is_empty());
            prop_assert_eq!(mix.first_sparse_row(n), first);
            let (s, e) = (sizes.0 + sizes.1 + 1, n.saturating_sub(sizes.2));
            let saved = if s < e { (e - s) * (s + e - 1 - 2 * (s - 1)) / 2 } else { 0 };
            prop_assert_eq!(middle.visible(), u128::from(saved));
        }

        #[test]
        fn any_sizes_are_safe(sizes: (u64, u64, u64), first_row: u64, rows: u64, prompt_len: u64, i: u64) {
            let mix = TriangleMix::new(sizes.0, sizes.1, sizes.2);
            let _ = (mix.first_sparse_row(prompt_len), mix.leaves_out(TriangleRows { first_row, rows, prompt_len }));
            for part in TrianglePart::ALL {
                let geometry = mix.geometry(part, TriangleRows { first_row, rows, prompt_len });
                let _ = (geometry.visible(), geometry.runs(i), geometry.tile(0..i, 0..i));
            }
        }
    }

    #[test]
    fn edges_are_where_the_paper_has_them() {
        let mix = TriangleMix::PAPER;
        let n = 4096;
        let triangle = mix.geometry(TrianglePart::Triangle, TriangleRows::whole(n));
        assert_eq!(mix.first_sparse_row(n), Some(521));
        assert_eq!(triangle.row(520), 0..521);
        assert!(triangle.is_full_row(520) && !triangle.is_full_row(521));
        assert_eq!(triangle.runs(521).collect::<Vec<_>>(), [0..8, 9..522]);
        assert_eq!(triangle.runs(3967).collect::<Vec<_>>(), [0..8, 3455..3968]);
        assert!(triangle.is_full_row(3968));
        // Short prompts are dense.
        assert_eq!(mix.first_sparse_row(649), None);
        assert_eq!(mix.first_sparse_row(650), Some(521));
    }

    impl MaskGeometry {
        fn is_full_row(&self, q: u64) -> bool {
            self.runs(q).eq(std::iter::once(0..q + 1))
        }
    }
}
