//! A case file: write one, read it back, run it, look at what came out.
//!
//! Case files carry one operator call with its data, so that a bug report from a machine with an NPU can be replayed on
//! one without. `ascend-attn run FILE` does what this example does.

use ascend_attention::case::{AttentionCase, Case, CaseTensor, Parameter, Tolerance, Verdict};
use ascend_attention::spec::ops::fused_infer_attention_score::Arguments;
use ascend_attention::{DType, Runtime};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Two queries of one head, three keys, head dimension 16: the operator's layout BNSD.
    let arguments = Arguments {
        input_layout: "BNSD".to_owned(),
        num_heads: 1,
        scale: 0.25,
        inner_precise: 0,
        ..Arguments::default()
    };
    let mut case = AttentionCase::new("two_queries", arguments);

    // Queries of zeros weigh all keys alike, so each output row is the mean of the values 1, 2 and 6.
    let zeros = CaseTensor::from_f32(DType::Float16, &[1, 1, 2, 16], &[0.0; 32])?;
    let keys = CaseTensor::from_f32(DType::Float16, &[1, 1, 3, 16], &[0.5; 48])?;
    let values: Vec<f32> = [1.0, 2.0, 6.0].iter().flat_map(|&v| [v; 16]).collect();
    let values = CaseTensor::from_f32(DType::Float16, &[1, 1, 3, 16], &values)?;
    case.arguments.set_tensor(Parameter::Query, zeros);
    case.arguments.key = vec![keys];
    case.arguments.value = vec![values];
    let means = CaseTensor::from_f32(DType::Float, &[1, 1, 2, 16], &[3.0; 32])?;
    case.expected = vec![("attention_out", means)];
    case.tolerance = Some(Tolerance { atol: 2e-3, rtol: 2e-3 });

    let path = std::env::temp_dir().join(format!("two_queries_{}.safetensors", std::process::id()));
    case.write(&path)?;
    let read = Case::read(&path);
    std::fs::remove_file(&path)?;
    let read = read?;
    println!("{} came back from {}", read.name, path.display());

    // The NPU if there is one, the emulation otherwise.
    let runtime = Runtime::auto()?;
    let stream = runtime.device(0)?.stream()?;
    let outcome = read.launch(&stream)?;
    for comparison in &outcome.comparisons {
        println!("{}: {} numbers compared", comparison.output, comparison.compared);
        if let Some(worst) = comparison.worst {
            println!(
                "the worst is number {}: got {}, want {}, off by {:.1e} where {:.1e} is allowed",
                worst.index, worst.got, worst.want, worst.error, worst.tolerance
            );
        }
    }
    match outcome.verdict {
        Verdict::Passed => {
            println!("passed on the backend {}", runtime.platform());
            Ok(())
        }
        other => Err(format!("the case did not pass: {other:?}").into()),
    }
}
