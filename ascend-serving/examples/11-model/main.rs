//! An engine on this crate: a small transformer that serves several requests at once, checked against the model's
//! definition.
//!
//! ```sh
//! cargo run --release -p ascend-serving --example 11-model                  # a model of random weights, every other layer with a window
//! cargo run --release -p ascend-serving --example 11-model -- --int8        # the same, layers without a window over a cache of INT8
//! cargo run --release -p ascend-serving --example 11-model -- MODEL.gguf    # a model of the architecture `llama` from a file
//! ```
//!
//! Requests arrive one after the other and begin alike. Their prompts are computed in chunks beside the decoding of
//! others ([`scheduler`]), what they begin with is computed once, and when the blocks run out the youngest gives its
//! own back and computes them again later. Steps that only decode are replayed from graphs, and layers with a window
//! have a small cache of their own ([`engine`]). In the end each request's tokens go through the model's definition
//! in double precision ([`dense`](ascend_testing::llama::dense)), and the logits are compared ([`comparison`]).

mod comparison;
mod engine;
mod questions;
mod scheduler;

use std::error::Error;
use std::num::NonZeroUsize;
use std::path::Path;

use ascend_attention::Runtime;
use ascend_serving::Causality;
use ascend_testing::llama::{self, Model, Random};
use engine::{Engine, Limits};
use scheduler::{Request, Scheduler};

/// Keys that a token sees in every other layer of the generated model.
const WINDOW: usize = 100;

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1) {
        Some(flag) if flag == "--int8" => generated(true),
        Some(path) => from_file(Path::new(&path)),
        None => generated(false),
    }
}

/// Requests of random tokens to a model of random weights, whose layers without a window may have a cache of INT8.
fn generated(int8: bool) -> Result<(), Box<dyn Error>> {
    let window = NonZeroUsize::new(WINDOW).ok_or("a window of no keys")?;
    let model = llama::generated([Causality::Window(window), Causality::Causal].repeat(2));
    let mut random = Random(7);
    let mut tokens = |count| -> Vec<u32> {
        let token = |_| (random.draw() % model.config.vocabulary as u64) as u32;
        (0..count).map(token).collect()
    };
    let shared = tokens(200);
    // Some begin near the end of a block, so that they soon need another one.
    let own = [40, 45, 170, 178, 20, 120, 150].into_iter().enumerate();
    let requests = own.map(|(number, own)| {
        let own = tokens(own);
        let new = 24 + 9 * (number % 4);
        Request::new(number, [&shared[..], &own].concat(), shared.len(), new)
    });
    let limits = Limits { blocks: 11, windowed_blocks: 8, longest: 512, graphs: vec![1, 2, 4], int8 };
    let finished = serve(&model, requests.collect(), &limits)?;
    let full = model.config.layers.iter();
    let full = full.filter(|layer| layer.window().is_none()).count();
    comparison::check(&model, &finished, if int8 { full } else { 0 })
}

/// Questions to a model from a file.
fn from_file(path: &Path) -> Result<(), Box<dyn Error>> {
    let (model, vocabulary) = llama::load(path)?;
    let shared = vocabulary.encode(questions::BEGINNING);
    let requests = questions::ASKED.iter().enumerate();
    let requests = requests.map(|(number, question)| {
        let own = vocabulary.encode(&format!("Question: {question}\nAnswer:"));
        Request::new(number, [&shared[..], &own].concat(), shared.len(), 12)
    });
    let limits = Limits { blocks: 9, windowed_blocks: 0, longest: 384, graphs: vec![1, 2, 4], int8: false };
    let finished = serve(&model, requests.collect(), &limits)?;
    for request in &finished {
        // What comes behind the answer would be the next question.
        let text = vocabulary.decode(&request.tokens[request.shared..]);
        println!("{}", text.lines().take(2).collect::<Vec<_>>().join(" "));
    }
    comparison::check(&model, &finished, 0)
}

/// Lets an engine serve all requests.
fn serve(model: &Model, requests: Vec<Request>, limits: &Limits) -> Result<Vec<Request>, Box<dyn Error>> {
    let runtime = Runtime::auto()?;
    let stream = runtime.device(0)?.stream()?;
    println!("{} on {}", stream.device().soc_name(), runtime.platform());
    let mut engine = Engine::new(model, &stream, limits)?;
    let asked = requests.len();
    let mut scheduler = Scheduler::new(requests);
    while !scheduler.is_done() {
        scheduler.step(&mut engine)?;
    }
    let (finished, counts) = scheduler.finish();
    let replays = engine.replays();
    println!("{counts}\n{replays} steps replayed from graphs");
    let happened = [counts.shared_blocks, counts.preempted, counts.resumed];
    if finished.len() != asked || !engine.is_idle() {
        return Err("a request or a block was lost".into());
    }
    if happened.contains(&0) || (replays == 0) != limits.int8 {
        return Err("nothing was shared, preempted, resumed or replayed, or an INT8 cache was replayed".into());
    }
    Ok(finished)
}
