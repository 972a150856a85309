//! The attention kernels, case by case: `cargo bench --bench attention -- [TEXT]` prints the whole table, or the cases
//! whose name contains the text. The same cases as `ascend-attn bench`, which has more options.
//!
//! Run as a test, it measures nothing and computes the smallest case once.

#[path = "../src/bench/cases.rs"]
mod cases;
#[path = "../src/bench/measure.rs"]
mod measure;
#[path = "../src/random.rs"]
mod random;

use ascend_attention::spec::DType;
use std::process::ExitCode;

const TYPES: [(&str, DType); 3] = [("f16", DType::Float16), ("bf16", DType::Bf16), ("f32", DType::Float)];

fn main() -> ExitCode {
    match table() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn table() -> Result<(), String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if !arguments.iter().any(|argument| argument == "--bench") {
        return cases::CASES[0].prepare(DType::Float16)?.with(|ready| ready.run())?;
    }
    let filter = arguments.iter().find(|argument| !argument.starts_with('-'));
    println!(
        "{:34} {:5} {:>7} {:>10} {:>9} {:>9} {:>8}  roof, rate of copying, runs, working memory",
        "case", "type", "threads", "ms", "GFLOP/s", "GB/s", "of roof"
    );
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for threads in [1, cores] {
        let mut bench = measure::Bench::new(threads)?;
        let wanted = |case: &&cases::Case| filter.is_none_or(|text| case.name.contains(text));
        for case in cases::CASES.iter().filter(wanted) {
            for (name, held) in TYPES {
                let of = case.prepare(held)?.with(|ready| bench.measure(case, held, ready))??;
                let roof = match of.memory_bound {
                    true => format!("{:.1} GB/s", of.read_bytes_per_second / 1e9),
                    false => format!("{:.0} GFLOP/s", of.peak_gflops),
                };
                println!(
                    "{:34} {name:5} {threads:7} {:10.3} {:9.1} {:9.2} {:7.1}%  {roof}, {:.1} GB/s, {}, {:.1} MB",
                    case.name,
                    of.seconds * 1e3,
                    of.gflops,
                    of.bytes_per_second / 1e9,
                    of.fraction_of_peak * 100.0,
                    of.copy_bytes_per_second / 1e9,
                    of.runs,
                    of.scratch_bytes as f64 / 1e6,
                );
            }
        }
        if cores == 1 {
            break;
        }
    }
    Ok(())
}
