//! `ascend-attn mask`: draws which keys each query row sees.

mod case_mask;
mod flags;
mod formula;
mod picture;
mod resolve;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ascend_attention::spec::Visibility;
use ascend_attention::spec::geometry::{TriangleMix, TrianglePart, TriangleRows};
use clap::ValueEnum;

use super::Stop;
use super::drawing;
use super::output::{self, Output};
use formula::{Formula, Part};
pub(super) use resolve::triangle_sizes;

/// Draw which keys each query row sees
///
/// Without an output option the text form is written: one line for each query row, `#` where the key is visible and `.`
/// where it is hidden. Flags that do not belong to the mask are refused.
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    override_usage = "ascend-attn mask [OPTIONS] <KIND>\n       ascend-attn mask [OPTIONS] --case <FILE>"
)]
pub(super) struct Arguments {
    /// Sparse mode, or a mask that serving systems use
    #[arg(required_unless_present = "case", value_name = "KIND")]
    kind: Option<Kind>,
    /// Query rows [default: 16]
    #[arg(long, value_name = "N")]
    sq: Option<u64>,
    /// Keys [default: as many as query rows]
    #[arg(long, value_name = "N")]
    skv: Option<u64>,
    /// preTokens of modes 0, 4, 7 and 8 [default: no bound]
    #[arg(long, value_name = "N")]
    pre: Option<i64>,
    /// nextTokens of modes 0, 4, 7 and 8 [default: no bound; in modes 7 and 8 that of an uncut sequence]
    #[arg(long, value_name = "N")]
    next: Option<i64>,
    /// sliding-window and TriangleMix: keys of a row's window, its own among them, so that TriangleMix's
    /// sliding_window_size is one less [default: 4; TriangleMix: that of the preset]
    #[arg(long, value_name = "N")]
    window: Option<u64>,
    /// TriangleMix: keys at the start that every row sees
    #[arg(long, value_name = "N")]
    sink: Option<u64>,
    /// TriangleMix: rows at the end of the prompt that see everything
    #[arg(long, value_name = "N")]
    last: Option<u64>,
    /// TriangleMix: length of the whole prompt, of which the rows are the last ones that are there [default: skv]
    #[arg(long, value_name = "N")]
    prompt_len: Option<u64>,
    /// TriangleMix: sizes that --sink, --window and --last override
    /// [default: paper]
    #[arg(long, value_name = "NAME")]
    preset: Option<Preset>,
    /// Modes 5 and 6, and prefix: keys that every row sees; in packed sequences one number for each [default: 0]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    prefix: Vec<i64>,
    /// local: keys of a chunk [default: 4]
    #[arg(long, value_name = "N")]
    chunk: Option<u64>,
    /// Packed sequences: ends of their query rows, cumulative
    #[arg(long, value_name = "N,N", value_delimiter = ',', requires = "kv_ends", conflicts_with_all = ["sq", "skv"])]
    q_ends: Vec<i64>,
    /// Packed sequences: ends of their keys, cumulative
    #[arg(long, value_name = "N,N", value_delimiter = ',', requires = "q_ends")]
    kv_ends: Vec<i64>,
    /// Mode 9 and tree: file with the parent of each token, -1 for a root: numbers between commas, spaces or brackets
    #[arg(long, value_name = "FILE")]
    tree: Option<PathBuf>,
    /// Modes 0 and 1: the mask tensor, as a file in the text form, which says how many rows and keys there are
    #[arg(long, value_name = "FILE")]
    tensor: Option<PathBuf>,
    /// Draw what a case file's call sees; with --sequence and the output options alone
    #[arg(long, value_name = "FILE", conflicts_with = "kind")]
    case: Option<PathBuf>,
    /// Which sequence of the case [default: the first]
    #[arg(long, value_name = "N", requires = "case")]
    sequence: Option<usize>,
    /// --png and --svg: rows and keys of the tiles that are counted and drawn [default: 128, or a few for small masks]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    block: Option<u64>,
    /// Write the text form to standard output also where a picture or an explanation is asked for
    #[arg(long)]
    text: bool,
    /// Write a picture
    #[arg(long, value_name = "FILE")]
    png: Option<PathBuf>,
    /// Write a drawing
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Say why row I sees key J, or why not
    #[arg(long, num_args = 2, value_names = ["I", "J"])]
    explain: Vec<u64>,
}

/// What to draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// defaultMask
    Mode0,
    /// allMask
    Mode1,
    /// leftUpCausal
    Mode2,
    /// rightDownCausal
    Mode3,
    /// band
    Mode4,
    /// prefix
    Mode5,
    /// prefix, compressed
    Mode6,
    /// rightDownCausal with a cut sequence
    Mode7,
    /// leftUpCausal with a cut sequence
    Mode8,
    /// A tree of draft tokens behind a context, as `tree`
    Mode9,
    /// Keys up to the row's own place; the last row stands at the last key
    Causal,
    /// Some keys up to the row's own place
    SlidingWindow,
    /// The first keys, and those up to the row's own place
    Prefix,
    /// The 512 x 512 mask of latent attention
    Mla,
    /// What a chunk of a prompt sees behind a cache
    ChunkedPrefill,
    /// A tree of draft tokens
    Tree,
    /// TriangleMix: sinks, window and last rows
    Triangle,
    /// TriangleMix: sinks and window
    Streaming,
    /// TriangleMix: what the last rows see besides
    Last,
    /// TriangleMix: what is left out
    Middle,
    /// TriangleMix: the whole triangle
    Dense,
    /// Causal within chunks
    Local,
}

/// Sizes of TriangleMix by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preset {
    /// 8 sinks, a window of 513 keys, 128 last rows
    Paper,
    /// 4, 33, 64
    Guide,
    /// 8, 65, 128
    GuideLong,
}

/// Most rows of a picture of a tree or of a mask's tensor.
const MOST_ROWS: u64 = 1 << 20;

/// Most characters of a text form; a row has one for each key and one for its end.
const MOST_CELLS: u64 = 1 << 28;

pub(super) fn run(arguments: &Arguments, output: &mut Output) -> Result<ExitCode, Stop> {
    let (png, svg) = (arguments.png.as_deref(), arguments.svg.as_deref());
    let drawn = png.is_some() || svg.is_some();
    if arguments.block.is_some() && !drawn {
        return Err(Stop::Trouble(
            "--block is about pictures: give --png FILE or --svg FILE too, or leave it out".to_owned(),
        ));
    }
    let (title, formula) = match (&arguments.case, arguments.kind) {
        (Some(file), _) => {
            flags::of_case(arguments)?;
            let (title, formula, sequences) = case_mask::read(file, arguments.sequence.unwrap_or(0))?;
            if sequences > 1 && arguments.sequence.is_none() {
                output::remark(&format!("sequence 0 of {sequences}; --sequence N shows another"));
            }
            (title, formula)
        }
        (None, Some(kind)) => {
            flags::belong(arguments, kind)?;
            resolve::resolve(arguments, kind)?
        }
        (None, None) => return Err(Stop::Trouble("no KIND and no --case".to_owned())),
    };
    if let [i, j] = arguments.explain[..] {
        let (rows, keys) = (formula.q_len(), formula.kv_len());
        if i >= rows || j >= keys {
            return Err(Stop::Trouble(format!(
                "--explain {i} {j}: there are {rows} rows and {keys} keys, counted from 0"
            )));
        }
        for line in formula.explain(i, j) {
            output.line(line)?;
        }
    }
    if drawn {
        let rows = formula.q_len();
        if formula.is_counted_by_rows() && rows > MOST_ROWS {
            return Err(Stop::Trouble(format!(
                "{rows} rows of a mask that is counted row by row: a picture shows at most {MOST_ROWS}"
            )));
        }
        draw(&title, &formula, arguments.block, [png, svg])?;
    }
    if arguments.text || !(drawn || arguments.explain.len() == 2) {
        text(&formula, output)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the picture and the drawing that the arguments request.
fn draw(title: &str, formula: &Formula, block: Option<u64>, files: [Option<&Path>; 2]) -> Result<(), Stop> {
    drawing::write(&picture::draw(title, formula, block), files)
}

/// Draws what a layer of TriangleMix sees of a prompt that is computed in one call.
pub(super) fn draw_triangle(
    title: &str,
    sizes: TriangleMix,
    tokens: u64,
    block: u64,
    files: [Option<&Path>; 2],
) -> Result<(), Stop> {
    if files == [None, None] {
        return Ok(());
    }
    let rows = TriangleRows::whole(tokens);
    let part = Part::new(sizes, TrianglePart::Triangle, rows);
    let formula = Formula::Triangle(Box::new(part));
    draw(title, &formula, Some(block), files)
}

/// Writes one line for each row.
fn text(formula: &Formula, output: &mut Output) -> Result<(), Stop> {
    let (rows, keys) = (formula.q_len(), formula.kv_len());
    let characters = keys.checked_add(1).and_then(|line| rows.checked_mul(line));
    if characters.is_none_or(|cells| cells > MOST_CELLS) {
        return Err(Stop::Trouble(format!(
            "{rows} rows of {keys} keys are too many for text; --png and --svg draw them in tiles"
        )));
    }
    let width = usize::try_from(keys).unwrap_or(0);
    for i in 0..rows {
        let mut line = vec![b'.'; width];
        formula.each_run(i, &mut |run| {
            if let Some(cells) = line.get_mut(run.start as usize..run.end as usize) {
                cells.fill(b'#');
            }
        });
        output.line(String::from_utf8_lossy(&line))?;
    }
    Ok(())
}

fn trouble(file: &Path, error: &dyn std::fmt::Display) -> Stop {
    Stop::Trouble(format!("{}: {error}", file.display()))
}
