//! What goes wrong has a name: `cargo run --example 04-errors`.

use ascend_attention::Error;
use ascend_attention::prelude::*;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Runtime::auto()?.device(0)?;
    let stream = device.stream()?;
    let half = |shape: [usize; 4]| stream.upload(&vec![f16::ONE; shape.iter().product()], shape);
    let (query, cache) = (half([1, 8, 16, 64])?, half([1, 2, 48, 64])?);
    let attention = || FusedInferAttention::new(Layout::Bnsd).heads(8).kv_heads(2).scale(1.0 / 64f64.sqrt());

    println!("-- A broken rule is found before the operator is called, and says what to do:");
    let error = attention().kv_heads(3).plan((&query, &cache, &cache)).map(drop);
    match error {
        Err(Error::Violation(violation)) => {
            println!("rule:    {} ({})", violation.rule.id, violation.rule.source);
            println!("holds:   {}", violation.rule.holds);
            println!("given:   {}", violation.given);
            println!("allowed: {}", violation.allowed);
            println!("fix:     {}", violation.fix);
            println!("status:  {} is what CANN would return", violation.rule.status);
        }
        other => return Err(format!("expected a violation, got {other:?}").into()),
    }

    println!("\n-- A mask of the wrong shape:");
    let mask = stream.upload(&vec![false; 16 * 32], [16, 32])?;
    show(attention().mask(Mask::all_mask(mask)).plan((&query, &cache, &cache)))?;

    println!("\n-- A lint: the operator would take the call and not do what is meant. It can be allowed by its id:");
    let turned = half([1, 16, 8, 64])?.permute([0, 2, 1, 3])?;
    show(attention().plan((&turned, &cache, &cache)))?;
    attention().allow_lint("tensor.strided").plan((&turned, &cache, &cache))?;

    println!("\n-- Tensors other than the planned ones:");
    let plan = attention().plan((&query, &cache, &cache))?;
    show(plan.launch(&stream, (&query, &half([1, 2, 49, 64])?, &cache)))?;

    println!("\n-- Element types are checked by the compiler, or when a tensor becomes typed:");
    show(AnyTensor::from(&query).typed::<f32>())?;

    println!("\n-- Memory that runs out:");
    let total = device.memory_info()?.total;
    show(Tensor::<u8>::empty(&device, [total, 2]))?;

    println!("\n-- What CANN itself refuses comes with its function, its code by name, and its own text:");
    show(device.runtime().device(1000))?;

    println!("\n-- Nothing of this hurts: the device still computes.");
    let output = plan.launch(&stream, (&query, &cache, &cache))?.attention.download(&stream)?;
    if output.iter().all(|x| *x == f16::ONE) { Ok(()) } else { Err("an average of ones is one".into()) }
}

/// Prints an error that has to be there.
fn show<T>(outcome: Result<T, Error>) -> Result<(), &'static str> {
    match outcome {
        Ok(_) => Err("this should not work"),
        Err(error) => {
            println!("{error}");
            Ok(())
        }
    }
}
