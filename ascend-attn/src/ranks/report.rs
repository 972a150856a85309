//! The report on both sides, as text and as JSON.

use std::fmt;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::Work;
use super::costs::model::{Cost, Layer, MACHINES};
use super::divided::{PARTS, RankSteps};
use super::whole::{WholeSteps, place};
use crate::report::{counted, number};

pub(super) struct Report {
    work: Work,
    /// The largest difference of an element of the last step; infinite where an element is no number.
    pub(super) difference: f64,
    sent_bytes: u64,
    whole: Duration,
    divided: Duration,
    parts: [Duration; PARTS.len()],
}

impl Report {
    pub(super) fn new(work: &Work, whole: &WholeSteps, ranks: &[RankSteps]) -> Self {
        let steps = || 1..work.steps;
        let slowest = |time: &dyn Fn(&RankSteps) -> Duration| ranks.iter().map(time).max().unwrap_or_default();
        let part = |at: usize| median(steps().map(|step| slowest(&|rank| rank.times[step][at])));
        Self {
            work: *work,
            difference: difference(work, whole, ranks),
            sent_bytes: ranks.first().map_or(0, |rank| rank.sent_bytes),
            whole: median(steps().map(|step| whole.times[step])),
            divided: median(steps().map(|step| slowest(&|rank| rank.times[step].iter().sum()))),
            parts: std::array::from_fn(part),
        }
    }

    pub(super) fn title(&self) -> String {
        let Work { ranks, requests, tokens, new, by_rows, kv_heads, head_dim, .. } = self.work;
        let (heads, rows) = (self.work.heads_of_rank(), if by_rows { ", by rows" } else { "" });
        format!(
            "{} with {tokens} tokens each, {new} new in a step{rows}; {heads} heads of {head_dim} on each of {} \
             over {}",
            counted(requests, "request", "requests"),
            counted(ranks, "rank", "ranks"),
            counted(kv_heads, "key head", "key heads"),
        )
    }

    /// What a layer of the divided step costs on each machine.
    fn on_paper(&self) -> impl Iterator<Item = (&'static str, Cost)> {
        let Work { ranks, requests, tokens, new: rows, by_rows, heads, kv_heads, head_dim, .. } = self.work;
        let layer = Layer { requests, tokens, rows, heads, kv_heads, head_dim };
        MACHINES.iter().map(move |machine| (machine.name, layer.of_each_rank(machine, ranks, by_rows)))
    }

    /// The time of each part that there is: where rows are divided, keys are written as they are gathered, and nothing
    /// is exchanged or merged behind the attention.
    fn parts(&self) -> impl Iterator<Item = (&'static str, Duration)> {
        let is_there = |name: &str| !self.work.by_rows || matches!(name, "gather" | "attention");
        PARTS.into_iter().zip(self.parts).filter(move |(name, _)| is_there(name))
    }

    /// The time of the divided step as a multiple of that on one device.
    fn ratio(&self) -> f64 {
        self.divided.as_secs_f64() / self.whole.as_secs_f64()
    }

    pub(super) fn json(&self) -> Value {
        let Work { ranks, requests, tokens, new, by_rows, heads, kv_heads, head_dim, block_size, run, steps } =
            self.work;
        let parts = self.parts().map(|(name, time)| (name.to_owned(), json!(time.as_secs_f64())));
        let parts: Map<String, Value> = parts.collect();
        let paper: Map<String, Value> =
            self.on_paper().map(|(machine, cost)| (machine.to_owned(), json!(cost.seconds()))).collect();
        json!({
            "ranks": ranks, "requests": requests, "tokens": tokens, "new": new, "by_rows": by_rows, "heads": heads,
            "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size, "run": run, "steps": steps,
            "difference": number(self.difference),
            "sent_bytes": self.sent_bytes,
            "one_device_seconds": self.whole.as_secs_f64(),
            "divided_seconds": self.divided.as_secs_f64(),
            "ratio": number(self.ratio()),
            "part_seconds": parts,
            "paper_seconds": paper,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title())?;
        writeln!(f, "largest difference  {:.2e}", self.difference)?;
        writeln!(f, "sent by a rank      {} bytes a layer", self.sent_bytes)?;
        writeln!(f, "one device          {}", milliseconds(self.whole))?;
        write!(f, "divided             {}, {:.2} of one device", milliseconds(self.divided), self.ratio())?;
        for (name, time) in self.parts() {
            let name = if self.work.by_rows && name == "gather" { "gather and write" } else { name };
            write!(f, "\n  {name:<18}{}", milliseconds(time))?;
        }
        for (machine, cost) in self.on_paper() {
            let Cost { gather, attention, exchange, .. } = cost;
            let [gather, attention, exchange] = [gather, attention, exchange].map(|time| format!("{:.3}", time * 1e3));
            write!(f, "\non paper            {:.3} ms: ", cost.seconds() * 1e3)?;
            write!(f, "gather {gather}, attention {attention}, exchange and merge {exchange} ({machine})")?;
        }
        Ok(())
    }
}

fn milliseconds(time: Duration) -> String {
    format!("{:.3} ms", time.as_secs_f64() * 1e3)
}

fn median(times: impl Iterator<Item = Duration>) -> Duration {
    let mut times: Vec<Duration> = times.collect();
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// The largest difference of an element. Infinite where an element is no number, and unless the ranks together have
/// each head of each token once.
fn difference(work: &Work, whole: &WholeSteps, ranks: &[RankSteps]) -> f64 {
    let (dim, all) = (work.head_dim, work.heads * work.ranks);
    let mut wanted: Vec<Option<&[f32]>> = whole.output.chunks_exact(dim).map(Some).collect();
    let mut largest = 0.0f64;
    for (rank, steps) in ranks.iter().enumerate() {
        let tokens = steps.rows.iter().cloned().flatten();
        let rows = tokens.flat_map(|token| (0..work.heads_of_rank()).map(move |head| (token, head)));
        let mut output = steps.output.chunks_exact(dim);
        for (token, head) in rows {
            let head = if work.by_rows { head } else { place(work, rank, head) };
            let other = wanted.get_mut(token * all + head).and_then(Option::take);
            let Some((row, other)) = output.next().zip(other) else {
                return f64::INFINITY;
            };
            for (one, other) in row.iter().zip(other) {
                let apart = f64::from((one - other).abs());
                largest = if apart.is_nan() { f64::INFINITY } else { largest.max(apart) };
            }
        }
        if output.len() > 0 {
            return f64::INFINITY;
        }
    }
    if wanted.iter().any(Option::is_some) { f64::INFINITY } else { largest }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four tokens of two heads of an element: each has its number.
    fn difference_of(by_rows: bool, ranks: [(Vec<usize>, Vec<f32>); 2]) -> f64 {
        let work = Work {
            ranks: 2,
            requests: 1,
            tokens: 8,
            new: 4,
            by_rows,
            heads: 1,
            kv_heads: 1,
            head_dim: 1,
            block_size: 16,
            run: 16,
            steps: 2,
        };
        let whole = WholeSteps { times: Vec::new(), output: (0u8..8).map(f32::from).collect() };
        let ranks = ranks.map(|(tokens, output)| {
            let rows = tokens.into_iter().map(|token| token..token + 1).collect();
            RankSteps { times: Vec::new(), output, rows, sent_bytes: 0 }
        });
        difference(&work, &whole, &ranks)
    }

    #[test]
    fn every_row_of_the_ranks_is_compared_once() {
        let outer = || (vec![0, 3], vec![0.0, 1.0, 6.0, 7.0]);
        let inner = |last| (vec![1, 2], vec![2.0, 3.0, 4.0, last]);
        assert_eq!(difference_of(true, [outer(), inner(5.0)]), 0.0);
        assert_eq!(difference_of(true, [outer(), inner(5.5)]), 0.5);
        // A number that is none, rows of nobody, rows of both, and more or fewer numbers than rows.
        for other in [
            inner(f32::NAN),
            (vec![], vec![]),
            (vec![1], vec![2.0, 3.0]),
            outer(),
            (vec![1, 2], vec![2.0, 3.0, 4.0]),
            (vec![1, 2], vec![2.0, 3.0, 4.0, 5.0, 6.0]),
            (vec![1, 2, 4], vec![2.0, 3.0, 4.0, 5.0, 8.0, 9.0]),
        ] {
            assert_eq!(difference_of(true, [outer(), other.clone()]), f64::INFINITY, "{other:?}");
        }
        let heads = |first: f32| ((0..4).collect(), (0u8..4).map(|token| first + 2.0 * f32::from(token)).collect());
        assert_eq!(difference_of(false, [heads(0.0), heads(1.0)]), 0.0);
        assert_eq!(difference_of(false, [heads(0.0), (vec![0, 1, 2], vec![1.0, 3.0, 5.0])]), f64::INFINITY);
    }
}
