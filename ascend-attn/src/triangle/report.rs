//! The findings as text and as JSON.

use ascend_attention::Platform;
use ascend_attention::blockwise::SIDE;
use ascend_attention::spec::geometry::BlockCounts;
use ascend_serving::{AttentionShape, OutputDeviation};
use ascend_trianglemix::{PresetSource, TriangleForecast, TrianglePreset};
use serde_json::{Value, json};

use super::Findings;
use super::measure::Measured;
use crate::platform::DeviceReport;
use crate::report::number;

/// The lines of the text form.
pub(super) fn text(findings: &Findings) -> Vec<String> {
    let forecast = &findings.forecast;
    let (shape, sizes) = (forecast.shape, forecast.sizes);
    let count = forecast.sparse.indices().len();
    let mut lines = vec![format!(
        "{} tokens, {} layers; leave out the middle: {}",
        forecast.tokens,
        forecast.layers,
        match count {
            0 => "none".to_owned(),
            _ => format!("{count} ({})", forecast.sparse),
        }
    )];
    if let Some(model) = findings.model {
        lines.push(format!("layers of {}: {}", model.model, source(&model)));
    }
    lines.push(format!(
        "sinks {}, window {}, last rows {}; {} heads over {} of {} elements, {}",
        sizes.num_sink_tokens,
        sizes.sliding_window_size.saturating_add(1),
        sizes.num_last_tokens,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        findings.dtype.name()
    ));
    let (dense, triangle) = (forecast.dense_pairs, forecast.triangle_pairs);
    lines.push(row("", ["dense", "triangle", "share"]));
    let percent = |share: f64| format!("{:.1}%", 100.0 * share);
    let counts = |name: &str, dense: u128, triangle: u128| {
        let share = percent(triangle as f64 / dense.max(1) as f64);
        row(name, [&dense.to_string(), &triangle.to_string(), &share])
    };
    lines.push(counts("pairs, a layer and head", dense, triangle));
    let all = dense * forecast.layers as u128;
    lines.push(counts("pairs, all layers, a head", all, forecast.model_pairs()));
    let (all, left) = (forecast.dense_blocks, forecast.triangle_blocks);
    let block = forecast.block;
    let blocks = format!("blocks of {block}, computed");
    lines.push(counts(&blocks, all.computed(), left.computed()));
    lines.push(counts("  full", all.full, left.full));
    lines.push(counts("  partial", all.partial, left.partial));
    let cost = forecast.cost;
    lines.push(row("", ["stock calls", "block-sparse", "share"]));
    lines.push(counts("cost in pairs, predicted", cost.stock, cost.block_sparse));
    match &findings.measured {
        Ok(measured) => {
            let layers = &measured.layers;
            let (dense, sparse) = (layers.dense_seconds, layers.triangle_seconds);
            let predicted = dense * forecast.block_share();
            let times = |name: &str, dense: f64, sparse: f64| {
                let share = percent(sparse / dense.max(f64::MIN_POSITIVE));
                let ms = |seconds: f64| format!("{:.3}", seconds * 1e3);
                row(name, [&ms(dense), &ms(sparse), &share])
            };
            let model = |sparse| forecast.model(dense, sparse);
            let all = forecast.model(dense, dense);
            match layers.block_sparse_seconds {
                Some(seconds) => lines.push(times("ms, measured", sparse, seconds)),
                None => lines.push(format!("block-sparse calls: {}", why_not_block_sparse(forecast))),
            }
            lines.push(row("", ["dense", "triangle", "share"]));
            lines.push(times("ms, a layer, predicted", dense, predicted));
            lines.push(times("ms, a layer, measured", dense, sparse));
            lines.push(times("ms, all layers, predicted", all, model(predicted)));
            lines.push(times("ms, all layers, measured", all, model(sparse)));
            let [dense, triangle] =
                [all, model(sparse)].map(|seconds| format!("{:.0}", forecast.tokens_per_second(seconds)));
            lines.push(row("tokens/s of attention", [&dense, &triangle, ""]));
            lines.push(format!(
                "measured on {}, median of {}; all layers from one of each kind",
                on(measured),
                layers.runs
            ));
            let difference = &layers.difference;
            let [row, head, element] = place(forecast.shape, difference);
            lines.push(format!(
                "outputs differ by at most {:.3e} (row {row}, head {head}, element {element}), {:.3e} in the mean, \
                 {:.3e} of their size",
                difference.largest,
                difference.mean(),
                difference.relative()
            ));
            if difference.not_finite > 0 {
                lines.push(format!("{} elements are not finite", difference.not_finite));
            }
            if let Some(difference) = &layers.block_sparse_difference {
                lines.push(format!(
                    "outputs of stock and block-sparse calls differ by at most {:.3e}, {:.3e} in the mean",
                    difference.largest,
                    difference.mean()
                ));
            }
            if let Some(mass) = measured.mass {
                lines.push(format!(
                    "attention: {} to sinks and window, {} to the other keys of the last rows, {} to the middle",
                    percent(mass.streaming),
                    percent(mass.last),
                    percent(mass.middle)
                ));
            }
        }
        Err(why) => lines.push(format!("not measured: {why}")),
    }
    let mib = |bytes: u128| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    lines.push(format!(
        "memory: keys and values of all layers {}, dense or not; the mask {} for any length ({} as a tensor of every \
         row and key); outputs to merge by stock calls, a layer at a time, {}",
        mib(forecast.cache_bytes),
        mib(forecast.mask_bytes),
        mib(forecast.whole_mask_bytes),
        mib(forecast.part_bytes)
    ));
    lines
}

/// Why no block-sparse calls were measured.
fn why_not_block_sparse(forecast: &TriangleForecast) -> String {
    if forecast.triangle_pairs == forecast.dense_pairs {
        return "none, since nothing is left out".to_owned();
    }
    match forecast.tokens < SIDE {
        true => format!("none, since {} keys fill no page of {SIDE}", forecast.tokens),
        false => "not taken by the operator here".to_owned(),
    }
}

fn row(name: &str, [a, b, c]: [&str; 3]) -> String {
    format!("{name:28} {a:>18} {b:>18} {c:>7}")
}

/// Where the numbers of a model come from.
fn source(model: &TrianglePreset) -> &'static str {
    match model.source {
        PresetSource::Paper => "arXiv 2507.21526",
        PresetSource::Guide => "a guide for Qwen3 that publishes no measurement",
        PresetSource::Port => "a port to the 910B3 that publishes no accuracy; sizes of the paper",
    }
}

/// The platform of the times: those of the emulation do not predict the times of the chip whose name it has.
fn on(measured: &Measured) -> String {
    let DeviceReport { platform, soc, .. } = &measured.platform;
    match platform {
        Platform::Npu => format!("{soc}, an NPU"),
        Platform::Emulated => format!("this machine's CPU, by the emulation of {soc}"),
        other => format!("{soc}, by {other}"),
    }
}

/// The findings as one JSON object.
pub(super) fn json(findings: &Findings) -> String {
    let forecast = &findings.forecast;
    let (shape, sizes) = (forecast.shape, forecast.sizes);
    let blocks = |counts: BlockCounts| {
        json!({
            "full": exact(counts.full),
            "partial": exact(counts.partial),
            "empty": exact(counts.empty),
        })
    };
    let differs = |difference: &OutputDeviation| {
        let [row, head, element] = place(shape, difference);
        json!({
            "largest": number(difference.largest),
            "row": row,
            "head": head,
            "element": element,
            "mean": difference.mean(),
            "relative": difference.relative(),
            "not_finite": difference.not_finite,
        })
    };
    let mut object = json!({
        "tokens": forecast.tokens,
        "layers": forecast.layers,
        "triangle_layers": forecast.sparse.indices(),
        "model": findings.model.map(|model| model.model),
        "source": findings.model.as_ref().map(source),
        "num_sink_tokens": sizes.num_sink_tokens,
        "sliding_window_size": sizes.sliding_window_size,
        "num_last_tokens": sizes.num_last_tokens,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "dim": shape.head_dim,
        "dtype": findings.dtype.name(),
        "pairs": {
            "dense": exact(forecast.dense_pairs),
            "triangle": exact(forecast.triangle_pairs),
            "model": exact(forecast.model_pairs()),
        },
        "block": forecast.block,
        "blocks": { "dense": blocks(forecast.dense_blocks), "triangle": blocks(forecast.triangle_blocks) },
        "cost": { "stock": exact(forecast.cost.stock), "block_sparse": exact(forecast.cost.block_sparse) },
        "bytes": {
            "cache": exact(forecast.cache_bytes),
            "mask": exact(forecast.mask_bytes),
            "whole_mask": exact(forecast.whole_mask_bytes),
            "parts": exact(forecast.part_bytes),
        },
    });
    let mut found = match &findings.measured {
        Ok(measured) => {
            let layers = &measured.layers;
            let (dense, sparse) = (layers.dense_seconds, layers.triangle_seconds);
            let predicted = dense * forecast.block_share();
            let difference = &layers.difference;
            json!({
                "seconds": {
                    "dense": dense,
                    "triangle": sparse,
                    "block_sparse": layers.block_sparse_seconds,
                    "predicted": predicted,
                    "model_dense": forecast.model(dense, dense),
                    "model": forecast.model(dense, sparse),
                    "model_predicted": forecast.model(dense, predicted),
                },
                "tokens_per_second": {
                    "dense": forecast.tokens_per_second(forecast.model(dense, dense)),
                    "triangle": forecast.tokens_per_second(forecast.model(dense, sparse)),
                },
                "runs": layers.runs,
                "difference": differs(difference),
                "block_sparse_difference": layers.block_sparse_difference.as_ref().map(differs),
                "attention_mass": measured.mass.map(|mass| json!({
                    "streaming": mass.streaming,
                    "last": mass.last,
                    "middle": mass.middle,
                })),
            })
        }
        Err(why) => json!({ "not_measured": why }),
    };
    if let (Ok(measured), Value::Object(found)) = (&findings.measured, &mut found) {
        found.extend(measured.platform.json());
    }
    if let (Some(object), Value::Object(found)) = (object.as_object_mut(), found) {
        object.extend(found);
    }
    object.to_string()
}

/// Row, head and element of the largest difference of two outputs.
fn place(shape: AttentionShape, difference: &OutputDeviation) -> [usize; 3] {
    let vector = difference.at / shape.head_dim;
    [vector / shape.heads, vector % shape.heads, difference.at % shape.head_dim]
}

/// A count as a JSON number: counts of prompts of any allowed length fit.
fn exact(count: u128) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
