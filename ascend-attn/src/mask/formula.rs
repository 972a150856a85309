//! The mask that is drawn: a formula, with the reason for each of its cells.

use std::num::NonZeroU64;
use std::ops::Range;

use ascend_attention::SparseMode;
use ascend_attention::mask::HostMask;
use ascend_attention::spec::geometry::{
    LocalChunks, TileVisitor, TokenTree, TriangleMix, TrianglePart, TriangleRows, tiles_by_rows, tiles_one_by_one,
};
use ascend_attention::spec::{MaskGeometry, Sparsity, Tile, Visibility};

/// Most runs of keys that an explanation names.
const PRINTED_RUNS: u64 = 16;

/// A mask with reasons.
pub(super) enum Formula {
    /// A sparse mode, with its sequences one after another.
    Sparse(Blocks),
    /// A sparse mode with a tensor that hides more.
    Masked {
        geometry: MaskGeometry,
        mode: SparseMode,
        tensor: HostMask,
    },
    Triangle(Box<Part>),
    Local(LocalChunks),
    Tree {
        tree: TokenTree,
        context: u64,
    },
}

/// The sequences of a call, each with its own rows and keys.
pub(super) struct Blocks {
    mode: SparseMode,
    tokens: (i64, i64),
    /// First row, first key, geometry, prefix.
    blocks: Vec<(u64, u64, MaskGeometry, u64)>,
}

/// A part of TriangleMix.
pub(super) struct Part {
    sizes: TriangleMix,
    part: TrianglePart,
    rows: TriangleRows,
    geometry: MaskGeometry,
    streaming: MaskGeometry,
    dense: MaskGeometry,
}

/// Why a cell is visible or hidden.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Label {
    Hidden,
    /// Visible, for none of the reasons below.
    Seen,
    Sink,
    Window,
    Last,
    Prefix,
    /// Hidden, although it is in the causal triangle.
    LeftOut,
    /// Between packed sequences, where the rows of one see no keys of another.
    Elsewhere,
}

impl Part {
    pub(super) fn new(sizes: TriangleMix, part: TrianglePart, rows: TriangleRows) -> Self {
        Self {
            sizes,
            part,
            rows,
            geometry: sizes.geometry(part, rows),
            streaming: sizes.geometry(TrianglePart::Streaming, rows),
            dense: sizes.geometry(TrianglePart::Dense, rows),
        }
    }
}

impl Formula {
    /// The sequences of a call.
    pub(super) fn sparse(call: &Sparsity<'_>) -> Self {
        let (mut row, mut key) = (0, 0);
        let mut blocks = Vec::new();
        for (b, geometry) in call.geometries().enumerate() {
            let prefix = call.prefix.get(b).copied().unwrap_or(0);
            let prefix = if call.mode.reads_prefix() { prefix } else { 0 };
            blocks.push((row, key, geometry, u64::try_from(prefix).unwrap_or(0)));
            row += geometry.q_len();
            key += geometry.kv_len();
        }
        Self::Sparse(Blocks { mode: call.mode, tokens: (call.pre_tokens, call.next_tokens), blocks })
    }

    /// Whether finding the visible cells of a block of rows takes a step for each row.
    pub(super) fn is_counted_by_rows(&self) -> bool {
        match self {
            Self::Masked { .. } | Self::Tree { .. } => true,
            Self::Sparse(_) | Self::Triangle(_) | Self::Local(_) => false,
        }
    }

    /// The kinds of the tiles of `step` keys of some rows, from the first key on. Examines each row at most once,
    /// however many tiles there are.
    pub(super) fn tiles(&self, rows: Range<u64>, step: u64) -> Vec<Tile> {
        let step = NonZeroU64::new(step).unwrap_or(NonZeroU64::MIN);
        let mut tiles = Vec::new();
        self.each_tile(rows, step, &mut |run, tile| {
            tiles.extend(run.map(|_| tile));
        });
        tiles
    }

    /// One sequence whose geometry is known.
    pub(super) fn geometry(mode: SparseMode, tokens: (i64, i64), geometry: MaskGeometry) -> Self {
        Self::Sparse(Blocks { mode, tokens, blocks: vec![(0, 0, geometry, 0)] })
    }

    /// A mode in which rows see the keys that its geometry shows and the tensor does not hide.
    pub(super) fn masked(geometry: MaskGeometry, mode: SparseMode, tensor: HostMask) -> Self {
        Self::Masked { geometry, mode, tensor }
    }

    /// Why a cell is visible or hidden.
    pub(super) fn label(&self, i: u64, j: u64) -> Label {
        let seen = self.sees(i, j);
        match self {
            Self::Sparse(of) => match of.at(i) {
                Some((_, key, geometry, _)) if j < key || j - key >= geometry.kv_len() => Label::Elsewhere,
                Some((row, key, geometry, prefix)) if seen && prefix > 0 => {
                    let (i, j) = (i - row, j - key);
                    let causal = MaskGeometry::prefix(geometry.q_len(), geometry.kv_len(), 0);
                    if j < prefix && !causal.sees(i, j) { Label::Prefix } else { Label::Seen }
                }
                _ if seen && of.is_window() => Label::Window,
                _ if seen => Label::Seen,
                _ => Label::Hidden,
            },
            Self::Triangle(of) if of.part == TrianglePart::Dense && seen => Label::Seen,
            Self::Triangle(of) if seen && of.streaming.sees(i, j) => {
                if j < of.sizes.num_sink_tokens {
                    Label::Sink
                } else {
                    Label::Window
                }
            }
            Self::Triangle(of) if seen && of.part == TrianglePart::Middle => Label::Seen,
            Self::Triangle(_) if seen => Label::Last,
            Self::Triangle(of) if of.dense.sees(i, j) => Label::LeftOut,
            Self::Tree { context, .. } if seen && j < *context => Label::Prefix,
            Self::Local(_) if seen => Label::Window,
            _ if seen => Label::Seen,
            _ => Label::Hidden,
        }
    }

    /// The meaning of a label in this mask.
    pub(super) fn meaning(&self, label: Label) -> &'static str {
        match (self, label) {
            (Self::Tree { .. }, Label::Prefix) => "context",
            (Self::Tree { .. }, Label::Seen) => "ancestor or itself",
            (Self::Local(_), Label::Window) => "own chunk",
            (Self::Triangle(_), Label::Seen) => "visible",
            (_, Label::Hidden) => "hidden",
            (_, Label::Seen) => "visible",
            (_, Label::Sink) => "sink",
            (_, Label::Window) => "window",
            (_, Label::Last) => "last rows",
            (_, Label::Prefix) => "prefix",
            (_, Label::LeftOut) => "left out",
            (_, Label::Elsewhere) => "another sequence",
        }
    }

    /// Why row `i` sees key `j`, or why not, line by line. The row and the key must exist.
    pub(super) fn explain(&self, i: u64, j: u64) -> Vec<String> {
        let seen = self.sees(i, j);
        let verdict = if seen { "visible" } else { "hidden" };
        let mut lines = vec![format!("row {i}, key {j}: {verdict}")];
        lines.extend(self.rule(i, j));
        let (mut runs, mut first) = (0u64, Vec::new());
        self.each_run(i, &mut |run| {
            runs += 1;
            if runs <= PRINTED_RUNS {
                first.push(format!("{} to {}", run.start, run.end - 1));
            }
        });
        lines.push(match runs {
            0 => format!("row {i} sees no key: its output is 0 where inner_precise corrects it"),
            1..=PRINTED_RUNS => format!("row {i} sees the keys {}", first.join(" and ")),
            more => format!("row {i} sees {more} runs of keys"),
        });
        lines
    }

    /// The condition that decides.
    fn rule(&self, i: u64, j: u64) -> Vec<String> {
        match self {
            Self::Sparse(of) => of.rule(i, j),
            Self::Masked { geometry, mode, tensor } => {
                let mut lines = vec![format!("mode {mode} shows the keys {}", mode.formula())];
                let hidden = tensor.hides(0, i as usize, j as usize);
                lines.push(format!("the tensor has {} there", u8::from(hidden)));
                if !geometry.sees(i, j) {
                    lines.push("the mode and its tokens hide the key, whatever the tensor".to_owned());
                }
                lines
            }
            Self::Triangle(of) => {
                let q = of.rows.first_row + i;
                let sizes = of.sizes;
                let place = match self.label(i, j) {
                    Label::Sink => format!("it is a sink: {j} < {}", sizes.num_sink_tokens),
                    Label::Window => {
                        format!("it is in the window: {q} - {j} <= {}", sizes.sliding_window_size)
                    }
                    Label::Hidden => format!("it lies behind the row's own place: {j} > {q}"),
                    _ if q >= sizes.first_last_row(of.rows.prompt_len) => format!(
                        "it is neither sink nor in the window, in one of the last {} rows",
                        sizes.num_last_tokens
                    ),
                    _ => "it is in the middle: neither sink nor in the window, and not in the last rows".to_owned(),
                };
                let prompt = of.rows.prompt_len;
                vec![
                    format!("row {i} is at place {q} of a prompt of {prompt}; the mask shows the part {:?}", of.part),
                    place,
                ]
            }
            Self::Local(_) => {
                vec!["a row sees the keys of its own chunk up to its place; the last row is at the last key".to_owned()]
            }
            Self::Tree { tree, context } if j >= *context => {
                let (token, other) = (i as usize, (j - context) as usize);
                let path = std::iter::successors(Some(token), |&token| tree.parent(token));
                let path: Vec<String> = path.take(32).map(|token| token.to_string()).collect();
                vec![
                    format!("key {j} is token {other} of the tree"),
                    format!("token {token} and its ancestors: {}", path.join(", ")),
                ]
            }
            Self::Tree { context, .. } => {
                vec![format!("every token sees the {context} keys of the context")]
            }
        }
    }
}

impl Blocks {
    /// The sequence of a row.
    fn at(&self, i: u64) -> Option<(u64, u64, MaskGeometry, u64)> {
        let before = self.blocks.partition_point(|&(row, ..)| row <= i);
        // If several sequences begin at a row, all but the last are empty.
        self.blocks.get(before.checked_sub(1)?).copied()
    }

    /// The kind of a block of rows and keys: no two sequences have rows or keys in common.
    fn tile(&self, rows: Range<u64>, keys: Range<u64>) -> Tile {
        let end = self.blocks.last().map_or((0, 0), |(row, key, of, _)| (row + of.q_len(), key + of.kv_len()));
        let (rows, keys) = (rows.start..rows.end.min(end.0), keys.start..keys.end.min(end.1));
        let within = |of: &Range<u64>, first: u64, len: u64| {
            of.start.max(first) - first..of.end.min(first + len).saturating_sub(first)
        };
        let first = self.blocks.partition_point(|(row, _, of, _)| row + of.q_len() <= rows.start);
        let reached = self.blocks.iter().skip(first);
        for (row, key, of, _) in reached.take_while(|(row, ..)| *row < rows.end) {
            let own_rows = within(&rows, *row, of.q_len());
            let own_keys = within(&keys, *key, of.kv_len());
            if own_rows.is_empty() || own_keys.is_empty() {
                continue;
            }
            let len = |of: &Range<u64>| of.end - of.start;
            let whole = len(&own_rows) == len(&rows) && len(&own_keys) == len(&keys);
            match of.tile(own_rows, own_keys) {
                Tile::None => {}
                Tile::All if whole => return Tile::All,
                Tile::All | Tile::Mixed => return Tile::Mixed,
            }
        }
        Tile::None
    }

    fn is_window(&self) -> bool {
        self.mode == SparseMode::Band
    }

    fn rule(&self, i: u64, j: u64) -> Vec<String> {
        let mode = self.mode;
        let mut lines = vec![format!("mode {mode} shows the keys {}", mode.formula())];
        let Some((row, key, geometry, prefix)) = self.at(i) else {
            return lines;
        };
        if self.blocks.len() > 1 {
            let sequence = self.blocks.partition_point(|&(row, ..)| row <= i) - 1;
            lines.push(format!(
                "it is row {} of sequence {sequence}, whose keys are {key} to {}",
                i - row,
                (key + geometry.kv_len()).saturating_sub(1)
            ));
            if j < key || j - key >= geometry.kv_len() {
                lines.push("the key is another sequence's".to_owned());
                return lines;
            }
        }
        let mut numbers = format!("Sq {}, Skv {}", geometry.q_len(), geometry.kv_len());
        if mode.reads_tokens(true) {
            let (pre, next) = self.tokens;
            numbers.push_str(&format!(", preTokens {pre}, nextTokens {next}"));
        }
        if mode.reads_prefix() {
            numbers.push_str(&format!(", prefix {prefix}"));
        }
        lines.push(format!("with {numbers}, i {}, j {}", i - row, j - key));
        lines
    }
}

impl Visibility for Formula {
    fn q_len(&self) -> u64 {
        match self {
            Self::Sparse(of) => of.blocks.iter().map(|(_, _, of, _)| of.q_len()).sum(),
            Self::Masked { geometry, .. } => geometry.q_len(),
            Self::Triangle(of) => of.geometry.q_len(),
            Self::Local(of) => of.q_len(),
            Self::Tree { tree, context } => tree.behind(*context).q_len(),
        }
    }

    fn kv_len(&self) -> u64 {
        match self {
            Self::Sparse(of) => of.blocks.iter().map(|(_, _, of, _)| of.kv_len()).sum(),
            Self::Masked { geometry, .. } => geometry.kv_len(),
            Self::Triangle(of) => of.geometry.kv_len(),
            Self::Local(of) => of.kv_len(),
            Self::Tree { tree, context } => tree.behind(*context).kv_len(),
        }
    }

    fn each_run(&self, i: u64, visit: &mut dyn FnMut(Range<u64>)) {
        match self {
            Self::Sparse(of) => {
                if let Some((row, key, geometry, _)) = of.at(i) {
                    for run in geometry.runs(i - row) {
                        visit(run.start + key..run.end + key);
                    }
                }
            }
            Self::Masked { geometry, tensor, .. } => {
                // In these modes a row has one run, which the tensor cuts.
                let row = geometry.row(i);
                tensor.entry(0).each_run(i, &mut |run| {
                    let run = run.start.max(row.start)..run.end.min(row.end);
                    if !run.is_empty() {
                        visit(run);
                    }
                });
            }
            Self::Triangle(of) => of.geometry.each_run(i, visit),
            Self::Local(of) => of.each_run(i, visit),
            Self::Tree { tree, context } => tree.behind(*context).each_run(i, visit),
        }
    }

    fn sees(&self, i: u64, j: u64) -> bool {
        match self {
            Self::Sparse(of) => {
                of.at(i).is_some_and(|(row, key, geometry, _)| j >= key && geometry.sees(i - row, j - key))
            }
            Self::Masked { geometry, tensor, .. } => geometry.sees(i, j) && tensor.entry(0).sees(i, j),
            Self::Triangle(of) => of.geometry.sees(i, j),
            Self::Local(of) => of.sees(i, j),
            Self::Tree { tree, context } => tree.behind(*context).sees(i, j),
        }
    }

    fn tile(&self, rows: Range<u64>, keys: Range<u64>) -> Tile {
        match self {
            Self::Sparse(of) => of.tile(rows, keys),
            Self::Triangle(of) => of.geometry.tile(rows, keys),
            Self::Local(of) => of.tile(rows, keys),
            _ => ascend_attention::spec::geometry::tile_by_rows(self, rows, keys),
        }
    }

    fn each_tile(&self, rows: Range<u64>, width: NonZeroU64, visit: TileVisitor<'_>) {
        match self {
            Self::Triangle(of) => of.geometry.each_tile(rows, width, visit),
            Self::Local(of) => of.each_tile(rows, width, visit),
            Self::Sparse(_) => tiles_one_by_one(self, rows, width, visit),
            Self::Masked { .. } | Self::Tree { .. } => tiles_by_rows(self, rows, width, visit),
        }
    }

    fn visible(&self) -> u128 {
        match self {
            Self::Sparse(of) => of.blocks.iter().map(|(_, _, of, _)| of.visible()).sum(),
            Self::Triangle(of) => of.geometry.visible(),
            Self::Local(of) => of.visible(),
            _ => {
                let mut visible = 0;
                for i in 0..self.q_len() {
                    self.each_run(i, &mut |run| visible += u128::from(run.end - run.start));
                }
                visible
            }
        }
    }
}
