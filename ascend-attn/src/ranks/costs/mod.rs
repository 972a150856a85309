//! `ascend-attn costs`: what divisions of attention cost on paper, for more ranks than there are machines here.

pub(super) mod model;

use std::process::ExitCode;

use serde_json::{Value, json};

use super::number;
use crate::Stop;
use crate::output::Output;
use model::{Cost, Layer, MACHINES, Machine};

/// Print what attention divided over ranks costs on paper, by published speeds of links and memory
///
/// A layer of decoding with heads divided (TP), and with contexts divided over the ranks that would have copies of the
/// same keys (DCP); and a prompt with heads (TP), rows (PCP), or rows and keys in a ring divided. Milliseconds of a
/// layer and MiB of keys and values on each rank. Nothing is computed or measured; the book's page on ranks says which
/// figures are published and which are assumed.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Numbers of ranks, from 1 on
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [8, 16, 64, 256, 1024])]
    #[arg(value_parser = number(1..=1 << 16))]
    ranks: Vec<u64>,
    /// Number of requests that are decoded
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = number(1..=1 << 16))]
    requests: u64,
    /// Tokens of each request, and of the prompt
    #[arg(long, value_name = "N", default_value_t = 131_072, value_parser = number(1..=1 << 24))]
    tokens: u64,
    /// Query rows of a request in a step of decoding
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number(1..=4096))]
    rows: u64,
    /// Query heads of all ranks
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = number(1..=1 << 16))]
    heads: u64,
    /// Key heads of all ranks
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = number(1..=1 << 16))]
    kv_heads: u64,
    /// Elements of a head
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = number(1..=1024))]
    head_dim: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

type Division = (&'static str, fn(&Layer, &Machine, usize) -> Cost);

const DECODE: [Division; 2] = [("TP", Layer::decode_by_heads), ("DCP", Layer::decode_by_contexts)];

const PROMPT: [Division; 3] =
    [("TP", Layer::prompt_by_heads), ("PCP", Layer::prompt_by_rows), ("ring", Layer::prompt_by_ring)];

pub(crate) fn run(arguments: &Arguments, output: &mut Output) -> Result<ExitCode, Stop> {
    let size = |size: u64| usize::try_from(size).unwrap_or(usize::MAX);
    let decode = Layer {
        requests: size(arguments.requests),
        tokens: size(arguments.tokens),
        rows: size(arguments.rows),
        heads: size(arguments.heads),
        kv_heads: size(arguments.kv_heads),
        head_dim: size(arguments.head_dim),
    };
    let prompt = Layer { requests: 1, ..decode };
    let ranks: Vec<usize> = arguments.ranks.iter().map(|ranks| size(*ranks)).collect();
    if arguments.json {
        let machines = MACHINES.iter().map(|machine| {
            let each = |division: &[Division], layer| {
                Value::from_iter(ranks.iter().map(|&ranks| json_of(division, layer, machine, ranks)))
            };
            (machine.name.to_owned(), json!({ "decode": each(&DECODE, &decode), "prompt": each(&PROMPT, &prompt) }))
        });
        output.line(Value::from_iter(machines))?;
        return Ok(ExitCode::SUCCESS);
    }
    for machine in &MACHINES {
        output.line(format_args!("{}:\n", machine.name))?;
        output.line("| ranks | decode TP | DCP | prompt TP | PCP | ring | DCP wins from | ring wins from |")?;
        output.line("|---:|---:|---:|---:|---:|---:|---:|---:|")?;
        for &ranks in &ranks {
            let cells = |divisions: &[Division], layer: &Layer| {
                let costs = divisions.iter().map(|(_, cost)| cost(layer, machine, ranks));
                costs.map(|cost| cell(&cost)).collect::<Vec<_>>().join(" | ")
            };
            let (decoded, prompts) = (cells(&DECODE, &decode), cells(&PROMPT, &prompt));
            let [one, two] =
                [first_win(&DECODE, 1, &decode, machine, ranks), first_win(&PROMPT, 2, &prompt, machine, ranks)];
            output.line(format_args!("| {ranks} | {decoded} | {prompts} | {} | {} |", tokens(one), tokens(two)))?;
        }
        output.line("")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Milliseconds, and MiB of keys and values.
fn cell(cost: &Cost) -> String {
    format!("{}, {}", short(cost.seconds() * 1e3), short(cost.memory / f64::from(1 << 20)))
}

/// Three digits.
fn short(value: f64) -> String {
    let decimals = (2.0 - value.max(1e-3).log10().floor()).clamp(0.0, 3.0);
    format!("{value:.*}", decimals as usize)
}

/// The fewest tokens, a power of two from 1024 on, with which a division takes less time than each of the others.
fn first_win(divisions: &[Division], winner: usize, layer: &Layer, machine: &Machine, ranks: usize) -> Option<usize> {
    (10..=24).map(|power| 1 << power).find(|&tokens| {
        let layer = Layer { tokens, ..*layer };
        let seconds = divisions.iter().map(|(_, cost)| cost(&layer, machine, ranks).seconds());
        let seconds: Vec<f64> = seconds.collect();
        seconds.iter().enumerate().all(|(at, other)| at == winner || seconds[winner] < *other)
    })
}

fn tokens(count: Option<usize>) -> String {
    count.map_or_else(|| "never".to_owned(), |count| format!("{}k", count >> 10))
}

fn json_of(divisions: &[Division], layer: &Layer, machine: &Machine, ranks: usize) -> Value {
    let costs = divisions.iter().map(|(name, cost)| {
        let cost = cost(layer, machine, ranks);
        let Cost { gather, attention, exchange, memory } = cost;
        let seconds = json!({ "gather": gather, "attention": attention, "exchange": exchange, "all": cost.seconds() });
        ((*name).to_owned(), json!({ "seconds": seconds, "bytes": memory }))
    });
    let mut object: serde_json::Map<String, Value> = costs.collect();
    object.insert("ranks".to_owned(), ranks.into());
    Value::Object(object)
}
