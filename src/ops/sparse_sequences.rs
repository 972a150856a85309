//! The sequences of a call of sparse attention: their lengths and blocks on the device, known to the host.

use std::fmt;
use std::sync::Arc;

use ascend_spec::Rule;
use ascend_spec::ops::nsa_compress_with_cache::NsaCompressCacheProblem;
use ascend_spec::ops::nsa_compress_with_cache::rules::CONTENTS;
use ascend_spec::ops::sparse_sequences::{SparseContents, TokenLayout, checked_contents, unusual_contents};

use crate::error::{Error, Result};
use crate::ops::known_numbers::{KnownNumbers, NumbersCheck, longest, number, padded_table};
use crate::runtime::{Context, ReplayCheck, Stream};
use crate::tensor::{AnyTensor, Tensor};

/// The query rows and keys of each sequence and, for a paged cache, its blocks.
///
/// Operators of sparse attention read these numbers on the device, where nothing checks them. Made here, the host knows
/// them: plans refuse lengths and blocks that their tensors do not have. Those of a paged cache can be
/// [overwritten](Self::overwrite), for the next step of captured launches. Cloning shares the memory.
///
/// | made by | queries | keys |
/// |---|---|---|
/// | [`packed`](Self::packed) | `[T1, N, D]` | `[T2, 1, D]` |
/// | [`padded`](Self::padded) | `[B, S1, N, D]` | `[B, S2, 1, D]` |
/// | either, then [`paged`](Self::paged) | as before | `[blocks, block size, 1, D]` |
#[derive(Clone, Debug)]
pub struct SparseSequences {
    layouts: [TokenLayout; 2],
    /// Lengths as the layouts have them, and the block table, where -1 is no block.
    content: KnownNumbers<ContentCheck, 3>,
}

/// The query rows and the keys of each sequence, and the check that keeps others out.
type FixedLengths = ([Vec<i64>; 2], Arc<dyn ReplayCheck>);

/// What a plan requires of the numbers.
#[derive(Clone, Debug, PartialEq)]
enum ContentCheck {
    Within {
        sequences: ascend_spec::ops::sparse_sequences::SparseSequences,
        /// The rule of tensors that have room for what the numbers say.
        within: &'static Rule,
        /// The lints of query rows of no sequence, and of rows without keys, where the plan does not allow them.
        unusual: [Option<&'static Rule>; 2],
    },
    /// The plan has the lengths among its arguments, which stay as they are.
    Fixed([Vec<i64>; 2]),
    /// Sequences that write a compressed token have blocks of the cache, and slots.
    Compressed { problem: NsaCompressCacheProblem, slots: Arc<[i64]> },
}

impl NumbersCheck<3> for ContentCheck {
    fn check(&self, numbers: &[Vec<i64>; 3]) -> Result<()> {
        match self {
            Self::Within { sequences, within, unusual } => {
                checked_contents(sequences, numbers, within)?;
                let unusual = unusual_contents(sequences, numbers, *unusual);
                match unusual.into_iter().flatten().next() {
                    Some(lint) => Err(lint.into()),
                    None => Ok(()),
                }
            }
            Self::Fixed(lengths) if lengths[..] == numbers[..2] => Ok(()),
            Self::Fixed(_) => {
                Err(Error::invalid("lengths", "other lengths", "those of a plan that has them among its arguments")
                    .fix("make other sequences for other lengths, and plan with them"))
            }
            Self::Compressed { problem, slots } => checked_compression(problem, numbers, slots),
        }
    }
}

impl SparseSequences {
    /// Sequences with these query rows and keys, each side packed one sequence after the other.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for no sequence, another number of lengths of keys than of
    /// queries, and numbers beyond INT32; otherwise as for [`Stream::upload`].
    pub fn packed(stream: &Stream, query_lengths: &[usize], key_lengths: &[usize]) -> Result<Self> {
        Self::new(stream, [TokenLayout::Tnd; 2], [query_lengths, key_lengths], Vec::new())
    }

    /// Sequences with these query rows and keys, which have as much room each.
    ///
    /// # Errors
    /// As for [`SparseSequences::packed`].
    pub fn padded(stream: &Stream, query_lengths: &[usize], key_lengths: &[usize]) -> Result<Self> {
        Self::new(stream, [TokenLayout::Bsnd; 2], [query_lengths, key_lengths], Vec::new())
    }

    /// The sequences with their keys in a paged cache: the blocks of each, `rows`.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another number of rows than of sequences, a table without
    /// columns, and blocks beyond INT32; otherwise as for [`Stream::upload`].
    pub fn paged(&self, stream: &Stream, rows: &[impl AsRef<[usize]>]) -> Result<Self> {
        let [queries, keys] = self.content.read(|numbers| lengths_of(self.layouts, numbers))?;
        let columns = longest(rows);
        if columns == 0 {
            return Err(other_rows(rows, format_args!("a row of blocks for each of {} sequences", queries.len())));
        }
        let table = table(rows, columns, queries.len())?;
        let paged = Self::new(stream, [self.layouts[0], TokenLayout::PaBsnd], [&queries, &keys], table)?;
        Ok(Self { content: paged.content.with_table(2, rows.len())?, ..paged })
    }

    /// Waits for a stream, then replaces the numbers of as many sequences with keys in a paged cache, and waits for
    /// that: plans, and launches that were captured, read the new ones. Rows may be shorter than those of the table.
    /// Other streams that use the sequences have to be waited for before.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another number of sequences, longer rows, sequences whose
    /// keys are not in a paged cache, and other lengths than those of a plan that has them among its arguments, as
    /// those of native sparse attention; [`Error::Violation`] for what a plan refuses that was made of the sequences or
    /// of a clone of them, or a captured launch of such a plan, for as long as the plan or the graph is there. Nothing
    /// is replaced then.
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device; as for
    /// [`Stream::synchronize`]. Where writing itself fails, the sequences are refused by plans, launches and replays
    /// until they are overwritten again. No other thread may queue work meanwhile that reads them.
    pub fn overwrite(
        &self,
        stream: &Stream,
        query_lengths: &[usize],
        key_lengths: &[usize],
        rows: &[impl AsRef<[usize]>],
    ) -> Result<()> {
        let sequences = self.query_lengths().len();
        let Some(block_table) = self.block_table() else {
            return Err(Error::invalid(
                "sequences",
                "keys that are not in a paged cache",
                "sequences with a block table",
            )
            .fix("make other sequences for other lengths, and plan with them"));
        };
        let lengths = [query_lengths, key_lengths];
        let counts = lengths.map(<[usize]>::len);
        if counts != [sequences; 2] {
            return Err(other_counts(counts, format_args!("{sequences} of each, as there are")));
        }
        let columns = block_table.shape().get(1).copied().unwrap_or(0);
        let [queries, keys] = numbers(self.layouts, lengths)?;
        self.content.overwrite(stream, [queries, keys, table(rows, columns, sequences)?])
    }

    fn new(stream: &Stream, layouts: [TokenLayout; 2], lengths: [&[usize]; 2], table: Vec<i64>) -> Result<Self> {
        let counts = lengths.map(<[usize]>::len);
        if counts[0] == 0 || counts[0] != counts[1] {
            return Err(other_counts(counts, format_args!("both for each of at least one sequence")));
        }
        let [queries, keys] = numbers(layouts, lengths)?;
        let content = KnownNumbers::upload(stream, "sequences", [queries, keys, table], on_device)?;
        Ok(Self { layouts, content })
    }

    /// The numbers of query rows on the device, `[B]`; packed, the end of each sequence. Only
    /// [`overwrite`](Self::overwrite) can write to them.
    pub fn query_lengths(&self) -> &Tensor<i32> {
        self.content.tensor(0)
    }

    /// The numbers of keys on the device, `[B]`; packed, the end of each sequence. Only [`overwrite`](Self::overwrite)
    /// can write to them.
    pub fn key_lengths(&self) -> &Tensor<i32> {
        self.content.tensor(1)
    }

    /// The block table on the device, `[B, columns]`, of keys in a paged cache. Only [`overwrite`](Self::overwrite) can
    /// write to it.
    pub fn block_table(&self) -> Option<&Tensor<i32>> {
        self.content.given(2)
    }

    /// The query rows and the keys of each sequence, as the arguments of operators that read them on the host. They
    /// cannot be overwritten by others for as long as the check is kept.
    pub(crate) fn lengths(&self) -> Result<FixedLengths> {
        let (lengths, fixed) = self.content.read(|numbers| {
            let wide = |lengths: Vec<usize>| lengths.into_iter().map(|length| length as i64).collect();
            let [queries, keys, _] = numbers.clone();
            (lengths_of(self.layouts, numbers).map(wide), [queries, keys])
        })?;
        Ok((lengths, self.content.require(ContentCheck::Fixed(fixed))?))
    }

    /// The layouts of queries and keys, as CANN names them.
    pub(crate) fn layouts(&self) -> [&'static str; 2] {
        self.layouts.map(TokenLayout::name)
    }

    /// Refuses tensors that are not on this device.
    pub(crate) fn on(&self, context: &Arc<Context>) -> Result<()> {
        self.content.on(context)
    }

    /// The tensors as the arguments of a call: lengths of queries and of keys, and the block table, if there is one.
    pub(crate) fn each<P>(&self, parameters: [P; 3]) -> impl Iterator<Item = (P, &AnyTensor)> {
        self.content.each(parameters)
    }

    /// The block table as an argument of a call, if there is one.
    pub(crate) fn table<P>(&self, parameter: P) -> Option<(P, &AnyTensor)> {
        self.block_table().map(|table| (parameter, &**table))
    }

    /// Checks the numbers for a call: by the rule `within` whether its tensors have room for them, and by `lints`, but
    /// for the `allowed` ones, whether query rows belong to no sequence or have no keys. For as long as what it returns
    /// is kept, the numbers of each [overwrite](Self::overwrite) are checked, too.
    pub(crate) fn check(
        &self,
        sequences: &ascend_spec::ops::sparse_sequences::SparseSequences,
        within: &'static Rule,
        lints: impl Into<Option<[&'static Rule; 2]>>,
        allowed: &[&str],
    ) -> Result<Arc<dyn ReplayCheck>> {
        let lints = lints.into().map_or([None; 2], |lints| lints.map(Some));
        let unusual = lints.map(|lint| lint.filter(|lint| !allowed.contains(&lint.id)));
        self.content.require(ContentCheck::Within { sequences: *sequences, within, unusual })
    }

    /// As [`check`](Self::check), for a call that compresses blocks into slots of a cache. Other slots of a launch are
    /// checked by [`admits_slots`](Self::admits_slots).
    pub(crate) fn check_slots(
        &self,
        problem: NsaCompressCacheProblem,
        slots: &Arc<[i64]>,
    ) -> Result<Arc<dyn ReplayCheck>> {
        self.content.require(ContentCheck::Compressed { problem, slots: Arc::clone(slots) })
    }

    /// Refuses slots and blocks that the caches do not have, and slots that are there twice.
    pub(crate) fn admits_slots(&self, problem: &NsaCompressCacheProblem, slots: &[i64]) -> Result<()> {
        self.content.read(|numbers| checked_compression(problem, numbers, slots))?
    }
}

/// Refuses slots and blocks by the first fault of those that a call of NsaCompressWithCache reads.
fn checked_compression(problem: &NsaCompressCacheProblem, numbers: &[Vec<i64>; 3], slots: &[i64]) -> Result<()> {
    let mut wrong = None;
    problem.faults(SparseContents::of(numbers), slots, &mut |fault| wrong = wrong.or(Some(fault)));
    wrong.map_or(Ok(()), |fault| {
        Err(Error::from(CONTENTS.broken(fault, "slots and blocks of the caches, each slot once")))
    })
}

/// The lengths that are held as tensors of these layouts have them.
fn lengths_of(layouts: [TokenLayout; 2], [queries, keys, _]: &[Vec<i64>; 3]) -> [Vec<usize>; 2] {
    let side = |layout: TokenLayout, numbers: &[i64]| {
        let mut before = 0;
        let lengths = numbers.iter().map(|&number| {
            let begin = if layout == TokenLayout::Tnd { std::mem::replace(&mut before, number) } else { 0 };
            usize::try_from(number - begin).unwrap_or(0)
        });
        lengths.collect()
    };
    [side(layouts[0], queries), side(layouts[1], keys)]
}

/// Lengths as tensors of these layouts have them: packed, the end of each sequence.
fn numbers(layouts: [TokenLayout; 2], lengths: [&[usize]; 2]) -> Result<[Vec<i64>; 2]> {
    let side = |side: usize| {
        let mut end = 0usize;
        let numbers = lengths[side].iter().map(|&length| {
            end = end.saturating_add(length);
            number("lengths", if layouts[side] == TokenLayout::Tnd { end } else { length })
        });
        numbers.collect::<Result<Vec<i64>>>()
    };
    Ok([side(0)?, side(1)?])
}

/// The block table of `sequences` sequences with these rows, row by row, with -1 behind the blocks of each.
fn table(rows: &[impl AsRef<[usize]>], columns: usize, sequences: usize) -> Result<Vec<i64>> {
    let longest = longest(rows);
    if rows.len() != sequences || longest > columns {
        let allowed = format_args!("{sequences} rows of at most {columns} blocks");
        return Err(other_rows(rows, allowed));
    }
    padded_table(rows, columns, -1)
}

/// A number that INT32 holds, as the device has it. The -1 of an unused entry becomes block 0, so that an entry is a
/// block whenever it is read.
fn on_device(number: i64) -> i32 {
    number.max(0) as i32
}

#[cold]
fn other_rows(rows: &[impl AsRef<[usize]>], allowed: impl fmt::Display) -> Error {
    let given = format_args!("{} rows, the longest of {} blocks", rows.len(), longest(rows));
    Error::invalid("rows", given, allowed).fix("make the rows and the lengths from the same batch")
}

#[cold]
fn other_counts([queries, keys]: [usize; 2], allowed: impl fmt::Display) -> Error {
    let given = format_args!("{queries} of queries and {keys} of keys");
    Error::invalid("lengths", given, allowed).fix("make both from the same batch")
}

/// Refuses a call whose inputs imply no outputs; `too_large` is the refusal of outputs that memory cannot hold.
pub(crate) fn require_outputs<D>(
    implied: Option<D>,
    query: &AnyTensor,
    too_large: impl FnOnce() -> Error,
) -> Result<()> {
    let shape = query.desc().shape;
    match (implied, shape.rank()) {
        (Some(_), _) => Ok(()),
        (None, 0..3) => {
            Err(Error::invalid("query", shape, "[B, S1, N1, D] or [T1, N1, D]").fix("give the queries these axes"))
        }
        (None, _) => Err(too_large()),
    }
}

/// The refusal of a number of keys for which each row would have more indices than memory holds.
pub(crate) fn too_many_keys(count: i64) -> Error {
    Error::invalid("count", count, "rows that memory can hold").fix("choose fewer keys")
}

/// The refusal of queries whose attention is larger than memory: a strided query can repeat its bytes.
pub(crate) fn too_many_rows(query: &AnyTensor) -> Error {
    Error::invalid("query", query.desc(), "rows whose attention memory can hold").fix("attend with fewer rows")
}
