//! The rules of sequences, which each operator of sparse attention has.

use super::sequences::{Room, SparseSequences, TokenLayout};
use crate::allowed::{Axis, Checked, DivisorsOf, Multiples, Named, Rank, Shapes};
use crate::{Rule, TensorDesc, Violation};

/// Declares the rules of an operator of sparse attention: those about products, formats, sequences and what their
/// tensors hold, which each such operator has, and its own between them, in the form of [`rules!`](crate::rule::rules):
/// those about arguments, about attributes, and about shapes with the lints. Also declares the table `SEQUENCES` of the
/// rules that [`SequenceRules`] asks. `$id` begins each id, `$layout_key` is the argument with the layout of keys,
/// `$release_950` the release from which Ascend 950 has the operator, and `$without_keys` says what becomes of rows
/// without keys. `$columns` and `$multiples` are joined to the sentences on block tables and on block sizes: what the
/// operator requires besides, `""` where that is nothing.
macro_rules! sequence_rules {
    (
        $id:literal, $operator:literal, layout of keys $layout_key:literal, on Ascend 950 since $release_950:literal,
        columns $columns:literal, multiples $multiples:literal, rows without keys $without_keys:literal, in $scope:expr;
        { $($arguments:tt)* }
        { $($attributes:tt)* }
        { $($shapes:tt)* }
    ) => {
        $crate::rule::rules! {
            in $scope;
            PRODUCT = $id ".product", FIND_KERNEL_ERROR, V1, $operator " documentation, products" in Scope::ALL,
                "the product has the operator in the release",
                "run on Atlas A2 or Atlas A3 with CANN 8.5 or newer, or on Ascend 950 with CANN " $release_950
                " or newer";
            $($arguments)*
            format of $id, PARAM_INVALID, $operator " documentation, parameters";
            LAYOUT = $id ".layout", TILING_ERROR, V1, $operator " tiling, layouts",
                "layoutQuery is BSND or TND, and " $layout_key " the same or PA_BSND",
                "spell the layouts as CANN does";
            MODE = $id ".sparse_mode", TILING_ERROR, V1, $operator " tiling, sparseMode",
                "sparseMode is 0 or 3",
                "use 3 for causal attention, 0 for attention to all keys";
            TOKENS = $id ".tokens", TILING_ERROR, V1, $operator " tiling, preTokens and nextTokens",
                "preTokens and nextTokens are the largest INT64",
                "pass 9223372036854775807 for both";
            $($attributes)*
            RANK = $id ".rank", TILING_ERROR, V1, $operator " tiling, shapes",
                "query and key have the axes of their layouts",
                "describe the tensor with as many axes";
            BLOCK_TABLE = $id ".block_table", TILING_ERROR, V1, $operator " tiling, blockTable",
                "blockTable is [B, columns]" $columns ", for PA_BSND and for no other layout",
                "give a row of block ids for each sequence of a paged cache, and no table without one";
            LENGTHS = $id ".lengths", TILING_ERROR, V1, $operator " tiling, actualSeqLengths",
                "lengths have an element for each sequence, and are given for TND and for keys in a paged cache",
                "give a number for each sequence";
            BATCH = $id ".batch", TILING_ERROR, V1, $operator " tiling, batch",
                "query and key have the same number of sequences",
                "make both from the same batch";
            BLOCK_SIZE = $id ".block_size", TILING_ERROR, V1, $operator " tiling, block size",
                "a cache has at least one block, of 16 to 1024 keys, a multiple of 16" $multiples,
                "use such a block size";
            $($shapes)*
            ROWS_LEFT_OUT = $id ".rows_left_out", Lint("such rows of the outputs keep what was there"), V1,
                $operator " kernel, actualSeqLengthsQuery",
                "packed query rows all belong to a sequence",
                "give the lengths of all rows of the query, or a query of these rows alone";
            ROWS_WITHOUT_KEYS = $id ".rows_without_keys", Lint($without_keys), V1,
                $operator " kernel, lengths and sparseMode",
                "with sparseMode 3 a sequence has at least as many keys as query rows",
                "count a sequence's cached keys and its new ones among its keys";
            CONTENTS = $id ".contents", Overrun("rows of other memory are read or written"), V1,
                $operator " kernel, lengths and blockTable",
                "lengths are at least 0, ascend where they are ends, and lie within the tensors; blockTable has a "
                "block of the cache for each key",
                "take lengths and table of one batch and one cache, and give `SparseSequences` the length of each "
                "sequence, of which it makes the ends that packed rows have";
        }

        /// The rules of the call's sequences.
        const SEQUENCES: $crate::ops::sparse_sequences::SequenceRules =
            $crate::ops::sparse_sequences::SequenceRules {
                layout: &LAYOUT,
                mode: &MODE,
                tokens: &TOKENS,
                rank: &RANK,
                lengths: &LENGTHS,
                batch: &BATCH,
                block_table: &BLOCK_TABLE,
                block_size: &BLOCK_SIZE,
            };
    };
}

/// `CallContract::check_contents` and `lint_contents` of an operator of sparse attention, whose call has `check` for a
/// target. `$contents` are the parameters of the lengths of queries and keys and of the block table.
macro_rules! checked_by_sequences {
    ($contents:expr $(, $version:ident)?) => {
        fn check_contents(
            arguments: &Self::Arguments,
            _version: Version,
            target: $crate::Target,
            integers: &dyn Fn(&str) -> Vec<i64>,
        ) -> Result<(), $crate::Violation> {
            $(let $version = _version;)?
            let Ok(problem) = arguments.call().check($($version,)? target) else {
                return Ok(());
            };
            $crate::ops::sparse_sequences::checked_contents(
                &problem.sequences,
                &$contents.map(|parameter| integers(parameter.name())),
                &rules::CONTENTS,
            )
        }

        fn lint_contents(
            arguments: &Self::Arguments,
            _version: Version,
            target: $crate::Target,
            bytes: &dyn Fn(&str) -> Option<Vec<u8>>,
            report: &mut dyn FnMut($crate::Violation),
        ) {
            $(let $version = _version;)?
            let Ok(problem) = arguments.call().check($($version,)? target) else {
                return;
            };
            let mut numbers = [const { Vec::new() }; 3];
            for (numbers, parameter) in numbers.iter_mut().zip($contents) {
                if arguments.tensor(parameter).is_none() {
                    continue;
                }
                let Some(bytes) = bytes(parameter.name()) else {
                    return;
                };
                numbers.extend(bytes.as_chunks().0.iter().map(|&number| i64::from(i32::from_le_bytes(number))));
            }
            let lints = [Some(&rules::ROWS_LEFT_OUT), Some(&rules::ROWS_WITHOUT_KEYS)];
            let unusual = $crate::ops::sparse_sequences::unusual_contents(&problem.sequences, &numbers, lints);
            unusual.into_iter().flatten().for_each(report);
        }
    };
}

pub(crate) use {checked_by_sequences, sequence_rules};

/// The rules of an operator's sequences.
pub(crate) struct SequenceRules {
    pub(crate) layout: &'static Rule,
    pub(crate) mode: &'static Rule,
    pub(crate) tokens: &'static Rule,
    pub(crate) rank: &'static Rule,
    pub(crate) lengths: &'static Rule,
    pub(crate) batch: &'static Rule,
    pub(crate) block_table: &'static Rule,
    pub(crate) block_size: &'static Rule,
}

/// The tensors of a call that say which sequences it has.
pub(crate) struct SequenceTensors<'a> {
    pub(crate) query: &'a TensorDesc,
    pub(crate) key: &'a TensorDesc,
    /// Lengths of queries and of keys.
    pub(crate) lengths: [Option<TensorDesc>; 2],
    /// CANN's names of both.
    pub(crate) names: [&'static str; 2],
    pub(crate) block_table: Option<TensorDesc>,
    /// Keys of a block of the lists by which rows read a cache, whose table must have a column then; `None` for an
    /// operator without lists, which takes a table without columns.
    pub(crate) sparse_block_size: Option<i64>,
}

impl SequenceRules {
    /// Checks the attributes by which a row sees keys.
    pub(crate) fn visibility(&self, mode: i64, [before, after]: [i64; 2]) -> Checked {
        self.mode.takes(mode, [0, 3])?;
        self.tokens.takes(Named("preTokens", before), i64::MAX)?;
        self.tokens.takes(Named("nextTokens", after), i64::MAX)
    }

    /// The layouts of queries and keys by their names.
    pub(crate) fn layouts(&self, names: [&str; 2]) -> Result<[TokenLayout; 2], Violation> {
        match names.map(TokenLayout::from_name) {
            [Some(query), Some(key)]
                if query != TokenLayout::PaBsnd && (key == query || key == TokenLayout::PaBsnd) =>
            {
                Ok([query, key])
            }
            _ => Err(self.layout.broken(
                format_args!("{:?} with keys in {:?}", names[0], names[1]),
                "BSND or TND, with keys in the same or in PA_BSND",
            )),
        }
    }

    /// Checks axes, lengths and block table, and resolves the sequences.
    pub(crate) fn resolve(
        &self,
        tensors: &SequenceTensors<'_>,
        layouts: [TokenLayout; 2],
        causal: bool,
    ) -> Result<SparseSequences, Violation> {
        let &SequenceTensors { query, key, lengths, names, block_table, sparse_block_size } = tensors;
        let paged = layouts[1] == TokenLayout::PaBsnd;
        for (name, desc, layout) in [("query", query, layouts[0]), ("key", key, layouts[1])] {
            self.rank.takes(Named(name, desc.shape), Rank(layout.rank()))?;
        }
        for ((lengths, name), layout) in lengths.into_iter().zip(names).zip(layouts) {
            if layout != TokenLayout::Bsnd {
                self.lengths.requires(lengths, name)?;
            }
        }
        let count = |lengths: Option<TensorDesc>| lengths.and_then(|lengths| i64::try_from(lengths.elements()?).ok());
        let batch = match layouts[0] {
            TokenLayout::Tnd => count(lengths[0]).unwrap_or(0),
            TokenLayout::Bsnd | TokenLayout::PaBsnd => query.shape[0],
        };
        for (lengths, name) in lengths.into_iter().zip(names) {
            if let Some(count) = count(lengths) {
                self.lengths.takes(Named(name, count), batch)?;
            }
        }
        if layouts[1] == TokenLayout::Bsnd {
            self.batch.takes(Named("sequences of key", key.shape[0]), batch)?;
        }
        match (block_table, paged) {
            (Some(table), true) => {
                let shapes: &[&[Axis]] = &[&[Axis::Of(batch), Axis::Any]];
                self.block_table.takes(table.shape, Shapes(shapes))?;
                self.block_size.takes(Named("blocks", key.shape[0]), 1..)?;
                self.block_size.takes(key.shape[1], Multiples(16, ..=1024))?;
                if let Some(block) = sparse_block_size {
                    self.block_table.takes(Named("columns", table.shape[1]), 1..)?;
                    self.block_size.takes(Named("sparseBlockSize", block), DivisorsOf(key.shape[1]))?;
                }
            }
            (None, true) => {
                let allowed = "a row for each sequence";
                return Err(self.block_table.broken("no blockTable", allowed));
            }
            (given, false) => {
                let given = given.is_some();
                self.block_table.forbids([("blockTable without PA_BSND", given)])?;
            }
        }
        Ok(SparseSequences {
            batch: usize::try_from(batch).unwrap_or(0),
            query: Room::of(layouts[0], &query.shape),
            key: Room::of(layouts[1], &key.shape),
            columns: block_table.map_or(0, |table| table.shape[1] as usize),
            causal,
        })
    }
}

/// Checks that a tensor has these axes.
pub(crate) fn shaped(rule: &'static Rule, name: &str, desc: &TensorDesc, first: &[i64], last: &[i64]) -> Checked {
    let mut axes = [Axis::Any; 4];
    let sizes = first.iter().chain(last);
    let count = axes.iter_mut().zip(sizes).map(|(axis, &size)| *axis = Axis::Of(size)).count();
    rule.takes(Named(name, desc.shape), Shapes(&[&axes[..count]]))
}
