//! Requests that begin with the same cached blocks, which are read once for all of them.

use std::num::NonZeroUsize;
use std::ops::Range;

use ascend_attention::Element;
use ascend_attention::attention::{Cumulative, PerRequest};
use ascend_attention::merge::PartsOfRows;

use crate::batch::AttentionMetadata;
use crate::causality::Causality;
use crate::error::Result;
use crate::rules;

use super::program::StepProgram;
use super::step_call::StepCall;
use super::step_context::{LayerTensors, StepContext, merges_sinks};

/// Neighbouring requests of a batch that begin with the same cached blocks.
#[derive(Clone, Debug)]
struct SharedPrefix {
    /// Their places in the batch.
    requests: Range<usize>,
    /// Blocks that they share, all of them full.
    blocks: usize,
}

/// The steps that [`Backend::SharedPrefixDecode`](crate::Backend::SharedPrefixDecode) takes: those that save as much
/// as this, or more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedPrefixDecode {
    /// Fewest requests that share a prefix.
    pub min_requests: usize,
    /// Fewest keys that they share.
    pub min_shared_keys: usize,
    /// Fewest key reads that a step saves, summed over its shared prefixes: the shared keys of each times its requests
    /// but one.
    pub min_saved_keys: usize,
}

/// The bits that name the two calls in [`PartsOfRows`].
const SUFFIX: u16 = 1;
const PREFIX: u16 = 2;

/// How a step is divided.
#[derive(Debug)]
struct Division {
    prefixes: Vec<SharedPrefix>,
    /// How many of a prefix's blocks are read once, the last ones; `None` for all of them.
    blocks: Option<usize>,
    /// Which keys a token sees of those that its request reads on its own.
    causality: Causality,
}

impl Division {
    /// The range of a prefix's blocks that are read once.
    fn once(&self, prefix: &SharedPrefix) -> Range<usize> {
        let first = self.blocks.map_or(0, |once| prefix.blocks.saturating_sub(once));
        first..prefix.blocks
    }
}

impl SharedPrefixDecode {
    /// Where it begins to take less time than one packed call on the emulation, the less the more keys are shared, as
    /// `cargo bench -p ascend-serving --bench serving -- shared_prefix` measures it. Kernels there are bound by
    /// arithmetic. Decoding on an NPU is bound by memory, so that it should pay earlier there: to be measured.
    pub const MEASURED: Self = Self { min_requests: 16, min_shared_keys: 1024, min_saved_keys: 15 * 1024 };

    /// Reads every shared prefix once, even where that saves nothing.
    pub const ALWAYS: Self = Self { min_requests: 2, min_shared_keys: 1, min_saved_keys: 1 };

    /// Divides a step whose tokens see keys by `causality`; `None` if that does not pay.
    fn division(&self, metadata: &AttentionMetadata, causality: Causality) -> Option<Division> {
        let prefixes = self.find_shared_prefixes(metadata);
        if prefixes.is_empty() {
            return None;
        }
        let window = match causality {
            Causality::Causal => {
                return Some(Division { prefixes, blocks: None, causality });
            }
            Causality::Window(window) => window,
            Causality::Bidirectional | Causality::Chunk(_) => return None,
        };
        let block_size = metadata.settings().block_size.max(1);
        let lengths = metadata.kv_lengths().lengths();
        // The last token of the longest request sees the fewest of the shared blocks.
        let seen = |prefix: &SharedPrefix| {
            let lengths = lengths.get(prefix.requests.clone()).unwrap_or_default();
            let longest = lengths.iter().copied().max().unwrap_or(0);
            let hidden = longest.saturating_sub(window.get());
            prefix.blocks.saturating_sub(hidden.div_ceil(block_size))
        };
        let once = prefixes.iter().map(seen).min().filter(|once| *once > 0)?;
        let keys = once * block_size;
        let left = NonZeroUsize::new(window.get().saturating_sub(keys))?;
        let is_shared = |at: usize| prefixes.iter().any(|prefix| prefix.requests.contains(&at));
        let mut each = lengths.iter().enumerate();
        let whole = each.all(|(at, len)| *len <= left.get() || is_shared(at));
        let others = prefixes.iter().map(|prefix| prefix.requests.len().saturating_sub(1));
        let saved = others.fold(0usize, |sum, others| sum + keys * others);
        let pays = keys >= self.min_shared_keys && saved >= self.min_saved_keys;
        (whole && pays).then_some(Division { prefixes, blocks: Some(once), causality: Causality::Window(left) })
    }

    /// The groups that save most, in order; none if they save less than is required.
    fn find_shared_prefixes(&self, metadata: &AttentionMetadata) -> Vec<SharedPrefix> {
        let block_size = metadata.settings().block_size;
        let shared = shared_with_next(metadata);
        // Entry `n` is for the first `n` requests: the most keys saved, and the last shared prefix.
        let mut best: Vec<(usize, Option<SharedPrefix>)> = vec![(0, None)];
        for end in 1..=shared.len() + 1 {
            let mut found = (best.last().map_or(0, |(saved, _)| *saved), None);
            let mut blocks = usize::MAX;
            let steps = shared.iter().enumerate().take(end.saturating_sub(1)).rev();
            for (start, with_next) in steps {
                blocks = blocks.min(*with_next);
                let keys = blocks * block_size;
                if keys == 0 || keys < self.min_shared_keys {
                    break;
                }
                let others = end.saturating_sub(start).saturating_sub(1);
                let before = best.get(start).map_or(0, |(saved, _)| *saved);
                let saved = before + keys * others;
                if others + 1 >= self.min_requests && saved > found.0 {
                    let requests = start..end;
                    found = (saved, Some(SharedPrefix { requests, blocks }));
                }
            }
            best.push(found);
        }
        if best.last().map_or(0, |(saved, _)| *saved) < self.min_saved_keys.max(1) {
            return Vec::new();
        }
        let mut prefixes = Vec::new();
        while let Some((_, last)) = best.pop() {
            if let Some(prefix) = last {
                best.truncate(prefix.requests.start + 1);
                prefixes.push(prefix);
            }
        }
        prefixes.reverse();
        prefixes
    }
}

/// For each real request but the last, the number of full cached blocks that it shares with the next one.
fn shared_with_next(metadata: &AttentionMetadata) -> Vec<usize> {
    let block_size = metadata.settings().block_size.max(1);
    // A block that this step writes to is not shared.
    let lengths = metadata.new_and_cached();
    let full = lengths.map(|(_, cached)| cached.checked_div(block_size).unwrap_or(0));
    let rows = (0..metadata.requests()).map(|at| metadata.table().row(at).unwrap_or_default());
    let full: Vec<&[usize]> = rows.zip(full).map(|(row, full)| row.get(..full).unwrap_or(row)).collect();
    let shared = |pair: &[&[usize]]| match pair {
        [one, next] => one.iter().zip(*next).take_while(|(a, b)| a == b).count(),
        _ => 0,
    };
    full.windows(2).map(shared).collect()
}

pub(super) fn program<T: Element>(
    least: &SharedPrefixDecode,
    step: &StepContext<'_>,
    first: &LayerTensors<'_, T>,
) -> Result<StepProgram<T>> {
    let metadata = step.metadata;
    let causality = step.mask.causality()?.over(metadata.longest());
    let division = match merges_sinks(step, first)? {
        true => least.division(metadata, causality),
        false => None,
    };
    let Some(division) = division else {
        return Err(rules::BACKEND_SHARED_PREFIX
            .broken(
                format_args!(
                    "{} requests, {} pairs of neighbours with shared blocks, {causality:?}, {} sinks",
                    metadata.requests(),
                    shared_with_next(metadata).iter().filter(|n| **n > 0).count(),
                    first.describe_sinks(),
                ),
                format_args!(
                    "{least:?} or more, causal, a window within which every shared prefix has whole blocks, and sinks \
                 on Ascend 950 alone"
                ),
            )
            .into());
    };
    let lists = Lists::new(step, causality, &division)?;
    let mask = division.causality.mask(&step.stream.device().masks())?;
    let suffix = StepCall::packed(metadata.q_ends().clone(), lists.suffix_keys).blocks(lists.suffix_rows).mask(mask);
    let prefix = StepCall::packed(lists.prefix_ends, lists.prefix_keys).blocks(lists.prefix_rows).without_sinks();
    Ok(StepProgram::new([suffix, prefix]).merged(lists.parts))
}

/// Lengths and table rows of both calls.
struct Lists {
    prefix_ends: Cumulative,
    prefix_keys: PerRequest,
    prefix_rows: Vec<Vec<usize>>,
    suffix_keys: PerRequest,
    suffix_rows: Vec<Vec<usize>>,
    parts: Vec<PartsOfRows>,
}

impl Lists {
    fn new(step: &StepContext<'_>, causality: Causality, division: &Division) -> Result<Self> {
        let table = step.metadata.table();
        let block_size = step.block_table.block_size();
        let keys = |blocks: usize| blocks * block_size;
        let requests = step.metadata.new_and_cached();
        let mut prefixes = division.prefixes.iter().peekable();
        let (mut prefix_ends, mut prefix_keys, mut prefix_rows) = (vec![], vec![], vec![]);
        let (mut suffix_keys, mut suffix_rows, mut parts) = (vec![], vec![], vec![]);
        let (mut end, mut before) = (0usize, 0);
        for (at, (new, cached)) in requests.enumerate() {
            while prefixes.next_if(|prefix| prefix.requests.end <= at).is_some() {}
            let prefix = prefixes.peek().filter(|prefix| prefix.requests.contains(&at));
            let once = prefix.map_or(0..0, |prefix| division.once(prefix));
            let blocks = once.len();
            let row = table.row(at).unwrap_or_default();
            end += new;
            // The rows of a shared prefix are one sequence over its blocks; the rows between two are one sequence
            // without keys.
            let begins = match prefix {
                Some(prefix) => prefix.requests.start == at,
                None => at == 0 || before > 0,
            };
            match prefix_ends.last_mut() {
                Some(last) if !begins => *last = end,
                _ => {
                    prefix_ends.push(end);
                    prefix_keys.push(keys(blocks));
                    // A call needs a block for each sequence, also for sequences without keys.
                    let named = once.start..once.end.max(once.start + 1);
                    prefix_rows.push(row.get(named).unwrap_or(row).to_vec());
                }
            }
            before = blocks;
            // Blocks before those that are read once, from the first on that a token sees.
            let first = causality.shown_from(cached).checked_div(block_size);
            let first = first.unwrap_or(0).min(once.start);
            let own = cached.saturating_sub(keys(first + blocks));
            suffix_keys.push(new + own);
            let behind = row.get(once.end..).unwrap_or_default();
            let front = row.get(first..once.start).unwrap_or_default();
            suffix_rows.push([front, behind].concat());
            parts.push(PartsOfRows { rows: new, parts: if blocks > 0 { SUFFIX | PREFIX } else { SUFFIX } });
        }
        Ok(Self {
            prefix_ends: Cumulative::new(prefix_ends)?,
            prefix_keys: PerRequest::new(prefix_keys)?,
            prefix_rows,
            suffix_keys: PerRequest::new(suffix_keys)?,
            suffix_rows,
            parts,
        })
    }
}
