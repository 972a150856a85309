//! Maxima and sums of unknown order, or log-sum-exps of inference, in the place of those that training writes.

use ascend_attention::flash::{FlashOutput, SoftmaxState};
use ascend_attention::ring::RingUpdate;
use ascend_attention::{Output, Stream, Tensor};

fn main() {}

fn merged(
    stream: &Stream,
    inference: &Output<f32>,
    training: &FlashOutput<f32>,
    max: Tensor<f32>,
    sum: Tensor<f32>,
) -> ascend_attention::Result<()> {
    let _ = SoftmaxState { max: max.clone(), sum: sum.clone() };
    let _ = FlashOutput {
        attention: training.attention.clone(),
        softmax: (max, sum),
    };
    let _ = RingUpdate::new().plan(stream, (training, inference))?;
    Ok(())
}
