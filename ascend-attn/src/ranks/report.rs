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
        let Work { ranks, requests, tokens, new, by_rows, heads, kv_heads, head_dim, .. } = self.work;
        let (heads, rows) = if by_rows { (heads * ranks, ", by rows") } else { (heads, "") };
        format!(
            "{} with {tokens} tokens each, {new} new in a step{rows}; {heads} heads of {head_dim} on each of {} over {}",
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

    /// The time of the divided step as a multiple of that on one device.
    fn ratio(&self) -> f64 {
        self.divided.as_secs_f64() / self.whole.as_secs_f64()
    }

    pub(super) fn json(&self) -> Value {
        let Work { ranks, requests, tokens, new, by_rows, heads, kv_heads, head_dim, block_size, run, steps } =
            self.work;
        let parts = PARTS.iter().zip(self.parts);
        let parts: Map<String, Value> =
            parts.map(|((_, name), time)| ((*name).to_owned(), json!(time.as_secs_f64()))).collect();
        let paper: Map<String, Value> =
            self.on_paper().map(|(machine, cost)| (machine.to_owned(), json!(cost.seconds()))).collect();
        json!({
            "ranks": ranks, "requests": requests, "tokens": tokens, "new": new, "by_rows": by_rows, "heads": heads, "kv_heads": kv_heads,
            "head_dim": head_dim, "block_size": block_size, "run": run, "steps": steps,
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
        for ((_, name), time) in PARTS.iter().zip(self.parts) {
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

fn difference(work: &Work, whole: &WholeSteps, ranks: &[RankSteps]) -> f64 {
    let (dim, all) = (work.head_dim, work.heads * work.ranks);
    let mut largest = 0.0f64;
    for (rank, steps) in ranks.iter().enumerate() {
        let heads = if work.by_rows { all } else { work.heads };
        let tokens = steps.rows.iter().cloned().flatten();
        let rows = tokens.flat_map(|token| (0..heads).map(move |head| (token, head)));
        for ((token, head), row) in rows.zip(steps.output.chunks_exact(dim)) {
            let head = if work.by_rows { head } else { place(work, rank, head) };
            let other = &whole.output[(token * all + head) * dim..][..dim];
            for (one, other) in row.iter().zip(other) {
                let apart = f64::from((one - other).abs());
                largest = if apart.is_nan() { f64::INFINITY } else { largest.max(apart) };
            }
        }
    }
    largest
}
