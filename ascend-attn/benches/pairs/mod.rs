//! Two quantities measured in turns, so that a machine whose speed changes tells the same.

use std::fmt::Display;
use std::process::ExitCode;
use std::time::Instant;

use ascend_attention::{Element, Error, Result, Stream, Tensor};

const PAIRS: usize = 15;

/// Runs a bench with its number of pairs, which is 1 where it is run as a test.
pub(crate) fn main<E: Display>(run: impl FnOnce(usize) -> Result<(), E>) -> ExitCode {
    let is_bench = std::env::args().any(|argument| argument == "--bench");
    match run(if is_bench { PAIRS } else { 1 }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A tensor of what is made of numbers between -1 and 1, the same in every run.
pub(crate) fn numbers<T: Element>(stream: &Stream, shape: &[usize], make: impl Fn(f32) -> T) -> Result<Tensor<T>> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let numbers = (0..shape.iter().product()).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        make((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    });
    stream.upload(&numbers.collect::<Vec<_>>(), shape)
}

/// The seconds that a call takes until the stream has computed it.
pub(crate) fn seconds<E: From<Error>>(stream: &Stream, call: impl FnOnce() -> Result<(), E>) -> Result<f64, E> {
    let start = Instant::now();
    call()?;
    stream.synchronize()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Prints the medians of two quantities that were measured in turns, and of their ratio.
pub(crate) fn report(name: &str, [one, other]: [&str; 2], pairs: &[[f64; 2]]) {
    let median = |of: &dyn Fn(&[f64; 2]) -> f64| {
        let mut values: Vec<f64> = pairs.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    };
    println!(
        "{name}: {one} {:.3}, {other} {:.3}, ratio {:.3}",
        median(&|pair| pair[0]),
        median(&|pair| pair[1]),
        median(&|pair| pair[0] / pair[1])
    );
}
