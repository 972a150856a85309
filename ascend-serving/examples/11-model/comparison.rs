//! The engine's logits beside those of the model's definition.

use std::error::Error;
use std::sync::Mutex;
use std::thread;

use ascend_testing::llama::{Model, dense};

use crate::scheduler::Request;

/// How far rows of logits are apart.
#[derive(Default)]
struct Apart {
    rows: usize,
    /// The greatest difference of two logits.
    greatest: f64,
    /// The root mean square of a row's differences, as part of that of its logits, where it is largest.
    worst: f64,
}

/// Compares the logits that tokens were chosen by with those of the model's definition behind the same tokens.
///
/// The operator takes queries, keys and values in bf16 and gives its output so: four roundings a layer, each by at
/// most 2^-9 of the number. Errors that know nothing of each other add by their squares, so that a row of logits is
/// expected to be off by 2^-9 * sqrt(4 * layers) of its root mean square at most. At four times that it is wrong. A
/// window of one key too many makes rows that are off by many times as much again.
///
/// A key or value as INT8 is off by a step over the root of 12 on average, and a step is the token's largest number
/// in 127 parts. Of numbers like these the largest is hardly five times the root mean square: two more roundings by a
/// hundredth, in each of `int8_layers` layers.
pub(crate) fn check(model: &Model, finished: &[Request], int8_layers: usize) -> Result<(), Box<dyn Error>> {
    let left = Mutex::new(finished.iter());
    let next = || left.lock().ok().and_then(|mut left| left.next());
    let some = || {
        let mut apart = Apart::default();
        while let Some(request) = next() {
            apart.add(model, request);
        }
        apart
    };
    let threads = thread::available_parallelism()?.get();
    let parts: Vec<Apart> = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let rows: usize = parts.iter().map(|part| part.rows).sum();
    let greatest = parts.iter().fold(0.0, |most, part| larger(most, part.greatest));
    let worst = parts.iter().fold(0.0, |most, part| larger(most, part.worst));
    let rounded = 4.0 * model.layers.len() as f64 / (512.0 * 512.0);
    let quantised = 2.0 * int8_layers as f64 / (100.0 * 100.0);
    let tolerance = 4.0 * (rounded + quantised).sqrt();
    println!(
        "{rows} rows of logits: greatest difference {greatest:.4}; the worst row is off by {worst:.4} of its root mean \
         square, allowed {tolerance:.4}"
    );
    let chosen: usize = finished.iter().map(|request| request.tokens.len() - request.prompt).sum();
    if rows != chosen || rows == 0 {
        return Err(format!("{chosen} tokens were chosen, by {rows} rows of logits").into());
    }
    if worst.is_nan() || worst > tolerance {
        return Err("the logits are not those of the model".into());
    }
    println!("as expected");
    Ok(())
}

impl Apart {
    fn add(&mut self, model: &Model, request: &Request) {
        let positions: Vec<usize> = (request.prompt - 1..request.tokens.len() - 1).collect();
        let wanted =
            dense::logits(model, &request.tokens, &positions, |layer, row, key| model.config.sees(layer, row, key));
        for (got, want) in request.logits.iter().zip(&wanted) {
            let (mut errors, mut squares) = (0.0, 0.0);
            for (got, want) in got.iter().zip(want) {
                let error = f64::from(*got) - want;
                self.greatest = larger(self.greatest, error.abs());
                errors += error * error;
                squares += want * want;
            }
            self.worst = larger(self.worst, (errors / squares).sqrt());
            self.rows += 1;
        }
    }
}

/// The larger of two. Nothing is larger than what is no number.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a >= b { a } else { b }
}
