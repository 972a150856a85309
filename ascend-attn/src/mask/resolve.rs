//! Makes a formula from the command line.

use std::num::NonZeroU64;
use std::path::Path;

use ascend_attention::SparseMode;
use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::spec::geometry::{LocalChunks, TokenTree, TriangleMix, TrianglePart, TriangleRows};
use ascend_attention::spec::{Lengths, Sparsity};

use super::formula::{Formula, Part};
use super::{Arguments, Kind, Preset, trouble};
use crate::{Stop, text_file};

/// Most rows and keys: every sum of lengths stays far from overflow.
const LONGEST: u64 = 1 << 40;
/// Most bytes of the file of a tree or of a mask.
const MOST_BYTES: u64 = 1 << 28;

/// Title and formula of the mask that the arguments describe.
pub(super) fn resolve(arguments: &Arguments, kind: Kind) -> Result<(String, Formula), Stop> {
    let sq = arguments.sq.unwrap_or(16);
    let skv = arguments.skv.unwrap_or(sq);
    if sq.max(skv) > LONGEST {
        return Err(Stop::Trouble(format!("{} rows or keys: at most {LONGEST}", sq.max(skv))));
    }
    if let Some(len) = arguments.prompt_len.filter(|&len| len > LONGEST) {
        return Err(Stop::Trouble(format!("--prompt-len {len}: at most {LONGEST}")));
    }
    let sizes = format!("Sq {sq}, Skv {skv}");
    let part = |part| {
        let preset = arguments.preset.unwrap_or(Preset::Paper).sizes();
        let mix = triangle_sizes(preset, arguments.sink, arguments.window, arguments.last)?;
        let title = format!(
            "TriangleMix: {part:?}, {sizes}, sinks {}, window {}, last {}",
            mix.num_sink_tokens,
            mix.sliding_window_size.saturating_add(1),
            mix.num_last_tokens
        );
        Ok((title, triangle(arguments, mix, part, sq, skv)?))
    };
    match kind {
        Kind::Mode0 => sparse(arguments, SparseMode::DefaultMask),
        Kind::Mode1 => sparse(arguments, SparseMode::AllMask),
        Kind::Mode2 => sparse(arguments, SparseMode::LeftUpCausal),
        Kind::Mode3 => sparse(arguments, SparseMode::RightDownCausal),
        Kind::Mode4 => sparse(arguments, SparseMode::Band),
        Kind::Mode5 => sparse(arguments, SparseMode::Prefix),
        Kind::Mode6 => sparse(arguments, SparseMode::PrefixCompress),
        Kind::Mode7 => sparse(arguments, SparseMode::RightDownCausalBand),
        Kind::Mode8 => sparse(arguments, SparseMode::BandLeftUpCausal),
        Kind::Causal => named(arguments, "causal", SparseMode::RightDownCausal),
        Kind::ChunkedPrefill => named(arguments, "chunked prefill", SparseMode::RightDownCausal),
        Kind::Prefix => named(arguments, "prefix", SparseMode::Prefix),
        Kind::Mla => mla(arguments),
        Kind::SlidingWindow => {
            let window = arguments.window.unwrap_or(4);
            let before = before_own(window)?;
            let lengths = Lengths::Dense { batch: 1, q_len: sq, kv_len: skv };
            let call = Sparsity {
                pre_tokens: i64::try_from(before).unwrap_or(i64::MAX),
                next_tokens: 0,
                ..Sparsity::new(SparseMode::Band, lengths)
            };
            let title = format!("sliding window of {window} keys, {sizes}");
            Ok((title, Formula::sparse(&call)))
        }
        Kind::Mode9 => {
            let (title, formula) = tree(arguments, "mode9")?;
            Ok((format!("mode {}, {title}", SparseMode::Tree), formula))
        }
        Kind::Tree => tree(arguments, "tree"),
        Kind::Triangle => part(TrianglePart::Triangle),
        Kind::Streaming => part(TrianglePart::Streaming),
        Kind::Last => part(TrianglePart::Last),
        Kind::Middle => part(TrianglePart::Middle),
        Kind::Dense => part(TrianglePart::Dense),
        Kind::Local => {
            let chunk = NonZeroU64::new(arguments.chunk.unwrap_or(4))
                .ok_or_else(|| Stop::Trouble("--chunk 0: 1 or more".to_owned()))?;
            let title = format!("local chunks of {chunk}, {sizes}");
            Ok((title, Formula::Local(LocalChunks::new(chunk, sq, skv))))
        }
    }
}

/// A sparse mode under another name.
fn named(arguments: &Arguments, name: &str, mode: SparseMode) -> Result<(String, Formula), Stop> {
    let (title, formula) = sparse(arguments, mode)?;
    let rest = title.split_once(", ").map_or("", |(_, rest)| rest);
    Ok((format!("{name}, {rest}"), formula))
}

fn sparse(arguments: &Arguments, mode: SparseMode) -> Result<(String, Formula), Stop> {
    let tensor = arguments.tensor.as_deref().map(text_mask).transpose()?;
    let (sq, skv) = match &tensor {
        Some(tensor) => {
            let [rows, keys] = [0, 1].map(|axis| tensor.shape().get(axis).map_or(0, |&n| n as u64));
            for (flag, given, is) in [("--sq", arguments.sq, rows), ("--skv", arguments.skv, keys)] {
                if let Some(given) = given.filter(|&given| given != is) {
                    return Err(Stop::Trouble(format!(
                        "{flag} {given}: the mask of --tensor has {is}; leave {flag} out"
                    )));
                }
            }
            (rows, keys)
        }
        None => {
            let sq = arguments.sq.unwrap_or(16);
            (sq, arguments.skv.unwrap_or(sq))
        }
    };
    let packed = !arguments.q_ends.is_empty();
    let (lengths, at) = if packed {
        ends("--q-ends", &arguments.q_ends)?;
        ends("--kv-ends", &arguments.kv_ends)?;
        if arguments.q_ends.len() != arguments.kv_ends.len() {
            return Err(Stop::Trouble(format!(
                "--q-ends has {} sequences, --kv-ends {}",
                arguments.q_ends.len(),
                arguments.kv_ends.len()
            )));
        }
        let lengths = Lengths::Packed { q_ends: &arguments.q_ends, kv_ends: &arguments.kv_ends };
        let at = format!("query ends {:?}, key ends {:?}", arguments.q_ends, arguments.kv_ends);
        (lengths, at)
    } else {
        let lengths = Lengths::Dense { batch: 1, q_len: sq, kv_len: skv };
        (lengths, format!("Sq {sq}, Skv {skv}"))
    };
    prefixes(&arguments.prefix, lengths.batch())?;
    let mut call = Sparsity::new(mode, lengths);
    call.prefix = &arguments.prefix;
    call.has_tensor |= arguments.pre.is_some() || arguments.next.is_some() || tensor.is_some();
    call.pre_tokens = arguments.pre.unwrap_or(call.pre_tokens);
    call.next_tokens = match (arguments.next, mode) {
        (Some(next), _) => next,
        (None, SparseMode::RightDownCausalBand) => 0,
        (None, SparseMode::BandLeftUpCausal) => {
            // These tokens make the band of the cut sequence causal from the upper left.
            let (q_len, kv_len) = call.cut_sequence().map_or((0, 0), |b| lengths.of(b));
            q_len as i64 - kv_len as i64
        }
        (None, _) => call.next_tokens,
    };
    let mut title = format!("mode {mode}, {at}");
    if mode.reads_tokens(call.has_tensor) {
        for (name, given) in [("pre", arguments.pre), ("next", Some(call.next_tokens))] {
            if let Some(tokens) = given.filter(|&t| t < ascend_attention::spec::TOKENS_UNBOUNDED) {
                title.push_str(&format!(", {name} {tokens}"));
            }
        }
    }
    if mode.reads_prefix() {
        title.push_str(&format!(", prefix {:?}", arguments.prefix));
    }
    let formula = match tensor {
        Some(_) if packed => {
            return Err(Stop::Trouble(
                "--tensor does not go with --q-ends and --kv-ends: it is the mask of one sequence".to_owned(),
            ));
        }
        Some(tensor) => Formula::masked(call.geometry(0), mode, tensor),
        None => Formula::sparse(&call),
    };
    Ok((title, formula))
}

/// Checks that there is one prefix for each sequence.
fn prefixes(prefix: &[i64], sequences: usize) -> Result<(), Stop> {
    if !prefix.is_empty() && prefix.len() != sequences {
        return Err(Stop::Trouble(format!(
            "--prefix {prefix:?}: {} numbers for {sequences} sequences; one for each",
            prefix.len()
        )));
    }
    match prefix.iter().find(|&&keys| keys < 0) {
        Some(keys) => Err(Stop::Trouble(format!("--prefix {keys}: a number of keys, 0 or more"))),
        None => Ok(()),
    }
}

/// Refuses ends that do not ascend.
fn ends(name: &str, ends: &[i64]) -> Result<(), Stop> {
    let ascend = ends.iter().try_fold(0, |before, &end| (end >= before).then_some(end));
    match ascend {
        Some(last) if last <= LONGEST as i64 => Ok(()),
        Some(last) => Err(Stop::Trouble(format!("{name} ends at {last}: at most {LONGEST}"))),
        None => Err(Stop::Trouble(format!("{name} {ends:?}: cumulative ends, none below the one before it"))),
    }
}

/// The template itself, or part of it.
fn mla(arguments: &Arguments) -> Result<(String, Formula), Stop> {
    let (q_len, kv_len) = (arguments.sq.unwrap_or(512), arguments.skv.or(arguments.sq).unwrap_or(512));
    if q_len.max(kv_len) > 512 {
        return Err(Stop::Trouble(format!("{} rows or keys: the mask of latent attention has 512", q_len.max(kv_len))));
    }
    let lengths = Lengths::Dense { batch: 1, q_len, kv_len };
    let call = Sparsity::new(SparseMode::LeftUpCausal, lengths);
    let title = format!("latent attention, {q_len} x {kv_len} of 512 x 512");
    Ok((title, Formula::sparse(&call)))
}

/// The number of keys before a row's own, in a window that counts its own.
fn before_own(window: u64) -> Result<u64, Stop> {
    window
        .checked_sub(1)
        .ok_or_else(|| Stop::Trouble("--window 0: a row's own key is in its window, so 1 or more".to_owned()))
}

impl Preset {
    /// The sizes that the preset names.
    pub(crate) fn sizes(self) -> TriangleMix {
        match self {
            Preset::Paper => TriangleMix::PAPER,
            Preset::Guide => TriangleMix::GUIDE,
            Preset::GuideLong => TriangleMix::GUIDE_LONG_CONTEXT,
        }
    }
}

/// Sizes that `--sink`, `--window` and `--last` override.
pub(crate) fn triangle_sizes(
    preset: TriangleMix,
    sink: Option<u64>,
    window: Option<u64>,
    last: Option<u64>,
) -> Result<TriangleMix, Stop> {
    let before = window.map(before_own).transpose()?;
    Ok(TriangleMix::new(
        sink.unwrap_or(preset.num_sink_tokens),
        before.unwrap_or(preset.sliding_window_size),
        last.unwrap_or(preset.num_last_tokens),
    ))
}

fn triangle(arguments: &Arguments, sizes: TriangleMix, part: TrianglePart, sq: u64, skv: u64) -> Result<Formula, Stop> {
    let Some(first_row) = skv.checked_sub(sq) else {
        return Err(Stop::Trouble(format!("{sq} rows of {skv} keys: every row of a prompt is a key too")));
    };
    let prompt_len = arguments.prompt_len.unwrap_or(skv);
    if prompt_len < skv {
        return Err(Stop::Trouble(format!("--prompt-len {prompt_len}: at least the {skv} keys that are there")));
    }
    let rows = TriangleRows { first_row, rows: sq, prompt_len };
    Ok(Formula::Triangle(Box::new(Part::new(sizes, part, rows))))
}

/// The mask of a tree, by the name that was given.
fn tree(arguments: &Arguments, name: &str) -> Result<(String, Formula), Stop> {
    let Some(file) = &arguments.tree else {
        return Err(Stop::Trouble(format!("{name}: --tree FILE says the parent of each token, -1 for a root")));
    };
    let text = text_file::read(file, MOST_BYTES).map_err(Stop::Trouble)?;
    let separates = |c: char| c == ',' || c == '[' || c == ']' || c.is_whitespace();
    let numbers = text.split(separates).filter(|word| !word.is_empty());
    let parents: Vec<i64> = numbers
        .map(|word| {
            word.parse()
                .map_err(|_| trouble(file, &format_args!("{word:?}: a token's parent is a token's number, or -1")))
        })
        .collect::<Result<_, _>>()?;
    let tree = TokenTree::new(&parents).map_err(|error| trouble(file, &error))?;
    let tokens = tree.len() as u64;
    if arguments.sq.is_some_and(|sq| sq != tokens) {
        return Err(trouble(file, &format_args!("{tokens} tokens, not --sq {}", arguments.sq.unwrap_or(0))));
    }
    let keys = arguments.skv.unwrap_or(tokens);
    let Some(context) = keys.checked_sub(tokens) else {
        return Err(trouble(file, &format_args!("{tokens} tokens: --skv counts them too, and is {keys}")));
    };
    let title = format!("tree of {tokens} tokens behind {context} keys");
    Ok((title, Formula::Tree { tree, context }))
}

/// A mask in the text form.
fn text_mask(file: &Path) -> Result<HostMask, Stop> {
    let text = text_file::read(file, MOST_BYTES).map_err(Stop::Trouble)?;
    let lines: Vec<&[u8]> = text.lines().map(str::as_bytes).collect();
    let keys = lines.first().map_or(0, |line| line.len());
    for (at, line) in lines.iter().enumerate() {
        if line.len() != keys || line.iter().any(|cell| !b"#.".contains(cell)) {
            return Err(trouble(
                file,
                &format_args!(
                    "line {}: {keys} characters as in the first line, each `#` (visible) or `.` (hidden)",
                    at + 1
                ),
            ));
        }
    }
    HostMask::from_fn(lines.len(), keys, MaskForm::INT8, |i, j| lines[i][j] == b'#')
        .map_err(|error| trouble(file, &error))
}
