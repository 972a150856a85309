//! `ascend-attn triangle`: counts by the definition, outputs by a reference, files, refusals.

use super::{command, program, text, vectors, write};
use approx::abs_diff_eq;

use std::fs;
use std::path::Path;

use ascend_attention::DType;
use ascend_attention::case::{AttentionCase, CaseTensor, MaskSource, Parameter};
use serde_json::{Value, json};

fn triangle(arguments: &[&str]) -> std::process::Output {
    match arguments {
        // Runs nothing, so that it has no platform.
        ["analyse", ..] => program().arg("triangle").args(arguments).output().unwrap(),
        _ => command("triangle", arguments).output().unwrap(),
    }
}

#[track_caller]
fn found(arguments: &[&str]) -> Value {
    let mut all = arguments.to_vec();
    all.push("--json");
    let output = triangle(&all);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[track_caller]
fn refused(arguments: &[&str], why: &str) {
    let output = triangle(arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    let error = text(&output.stderr);
    assert!(error.contains(why), "{arguments:?}: {error}");
}

/// Numbers between -1 and 1 that bf16 holds.
fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from((state >> 25) as i8 - 64) / 64.0
    };
    (0..count).map(next).collect()
}

/// A safetensors file of F32 tensors.
fn save(file: &Path, tensors: &[(&str, [usize; 3], &[f32])]) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape, numbers) in tensors {
        let start = data.len();
        data.extend(numbers.iter().flat_map(|x| x.to_le_bytes()));
        let offsets = [start, data.len()];
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": offsets });
        header.insert((*name).to_owned(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    fs::write(file, bytes).unwrap();
}

#[test]
fn counts_of_pairs_and_blocks_are_those_of_the_definition() {
    let (n, sinks, window, last, block) = (300u64, 5, 40, 30, 32);
    let sees = |i: u64, j: u64| j <= i && (j < sinks || i - j < window || i + last >= n);
    let found = found(&[
        "--tokens",
        "300",
        "--layers",
        "10",
        "--only",
        "3,5-8",
        "--sink",
        "5",
        "--window",
        "40",
        "--last",
        "30",
        "--block",
        "32",
        "--measure",
        "never",
    ]);
    let pairs = (0..n).map(|i| (0..n).filter(|&j| sees(i, j)).count() as u64);
    let pairs: u64 = pairs.sum();
    let dense = n * (n + 1) / 2;
    assert_eq!(found["pairs"]["dense"], dense);
    assert_eq!(found["pairs"]["triangle"], pairs);
    assert_eq!(found["pairs"]["model"], 5 * dense + 5 * pairs);
    assert_eq!(found["triangle_layers"], json!([3, 5, 6, 7, 8]));
    let mut blocks = [0u64; 3];
    for row in (0..n).step_by(block) {
        for key in (0..n).step_by(block) {
            let end = |of: u64| (of + block as u64).min(n);
            let cells = || (row..end(row)).flat_map(|i| (key..end(key)).map(move |j| (i, j)));
            let seen = cells().filter(|&(i, j)| sees(i, j)).count();
            blocks[usize::from(seen > 0) + usize::from(seen == cells().count())] += 1;
        }
    }
    let [empty, partial, full] = blocks;
    let want = json!({ "full": full, "partial": partial, "empty": empty });
    assert_eq!(found["blocks"]["triangle"], want);
    assert_eq!(found["not_measured"], "--measure never");
    // Six partial blocks of 128: five stock calls and merges, or two calls over rows and two copies or merges.
    let cost = |pairs: u64, calls: u64| 6 * pairs * 128 * 128 + calls * 228_288;
    assert_eq!(found["cost"], json!({ "stock": cost(1, 5), "block_sparse": cost(2, 4) }));
    // Rows 45 to 269 leave keys out: windows and sinks, each with a log-sum-exp, and those over both.
    assert_eq!(found["bytes"]["parts"], 225 * 32 * (2 * 128 * 2 + 3 * 4));
    assert_eq!(found["bytes"]["cache"], 10 * 2 * n * 8 * 128 * 2);
}

#[test]
fn outputs_differ_as_much_as_a_reference_says() {
    let (n, dim, sinks, window, last) = (96usize, 64usize, 2usize, 9usize, 8usize);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("layer.safetensors");
    let [query, key, value] = [1, 2, 3].map(|seed| numbers(seed, n * dim));
    let shape = [n, 1, dim];
    save(&file, &[("query", shape, &query), ("key", shape, &key), ("value", shape, &value)]);
    let found = found(&[
        "--data",
        file.to_str().unwrap(),
        "--layers",
        "2",
        "--sink",
        "2",
        "--window",
        "9",
        "--last",
        "8",
        "--runs",
        "1",
        "--dtype",
        "f16",
        "--mass",
    ]);
    let (mut largest, mut middle, mut at) = (0.0f64, 0.0f64, 0);
    for i in 0..n {
        let dot = |j: usize| -> f64 {
            let products = (0..dim).map(|d| f64::from(query[i * dim + d] * key[j * dim + d]));
            products.sum::<f64>() / 8.0
        };
        let weights: Vec<f64> = (0..=i).map(|j| dot(j).exp()).collect();
        let sees = |j: usize| j < sinks || i - j < window || i + last >= n;
        let over = |visible: &dyn Fn(usize) -> bool, d: usize| {
            let seen = (0..=i).filter(|&j| visible(j));
            let (sum, total) = seen.fold((0.0, 0.0), |(sum, total), j| {
                let value = f64::from(value[j * dim + d]);
                (sum + weights[j] * value, total + weights[j])
            });
            sum / total
        };
        for d in 0..dim {
            let difference = (over(&|_| true, d) - over(&sees, d)).abs();
            if difference > largest {
                (largest, at) = (difference, i);
            }
        }
        let total: f64 = weights.iter().sum();
        let hidden = (0..=i).filter(|&j| !sees(j)).map(|j| weights[j]);
        middle += hidden.sum::<f64>() / total / n as f64;
    }
    let got = found["difference"]["largest"].as_f64().unwrap();
    assert!(abs_diff_eq!(got, largest, epsilon = 5e-3), "{got}, expected {largest} in row {at}");
    assert!(got > 0.1, "nothing was left out: {got}");
    let mass = found["attention_mass"]["middle"].as_f64().unwrap();
    assert!(abs_diff_eq!(mass, middle, epsilon = 1e-5), "{mass}, expected {middle}");
    assert_eq!(found["difference"]["not_finite"], 0);
    let (dense, rate) = (&found["seconds"]["model_dense"], &found["tokens_per_second"]["dense"]);
    let tokens = dense.as_f64().unwrap() * rate.as_f64().unwrap();
    assert!(abs_diff_eq!(tokens, n as f64, epsilon = 1e-6), "{tokens}");
    // No page has 128 keys.
    assert_eq!(found["seconds"]["block_sparse"], json!(null));
    assert_eq!(found["block_sparse_difference"], json!(null));
    assert_eq!((&found["tokens"], &found["heads"]), (&json!(96), &json!(1)));
}

#[test]
fn block_sparse_calls_are_compared_or_it_is_said_why_not() {
    let sizes = ["--sink", "4", "--window", "33", "--last", "64", "--layers", "2", "--heads", "1", "--kv-heads", "1"];
    let of = |tokens, dim| [&["--tokens", tokens, "--dim", dim, "--runs", "1"], &sizes[..]].concat();
    let found = found(&of("300", "64"));
    assert!(found["seconds"]["block_sparse"].as_f64().unwrap() > 0.0);
    let [by_blocks, dense] = ["block_sparse_difference", "difference"].map(|of| found[of]["largest"].as_f64().unwrap());
    assert!(by_blocks < 0.02 && by_blocks < dense / 4.0, "{by_blocks}, {dense}");
    for (tokens, dim, why) in [
        ("300", "64", "outputs of stock and block-sparse calls differ by at most"),
        ("300", "96", "block-sparse calls: not taken by the operator here"),
        ("120", "64", "block-sparse calls: none, since 120 keys fill no page of 128"),
        ("90", "64", "block-sparse calls: none, since nothing is left out"),
    ] {
        let output = triangle(&of(tokens, dim));
        let said = text(&output.stdout);
        assert!(said.contains(why), "{why}: {said}");
    }
}

#[test]
fn models_pictures_and_text_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let (png, svg) = (folder.path().join("a.png"), folder.path().join("a.svg"));
    let output = triangle(&[
        "--tokens",
        "131072",
        "--model",
        "qwen3-8b",
        "--png",
        png.to_str().unwrap(),
        "--svg",
        svg.to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    for part in [
        "131072 tokens, 36 layers; leave out the middle: 24 (5, 7, 10, 15-35)",
        "a port to the 910B3",
        "not measured: a dense layer has 140.7 TFLOP",
        "cost in pairs, predicted",
        "16384.0 MiB as a tensor of every row and key",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(fs::read(png).unwrap().starts_with(b"\x89PNG"));
    assert!(fs::read_to_string(svg).unwrap().contains("131072 tokens"));
}

#[test]
fn command_lines_and_data_that_do_not_fit_are_refused() {
    refused(&["--layers", "4"], "--tokens");
    refused(&["--tokens", "64"], "--layers");
    refused(&["--tokens", "64", "--model", "Qwen3-4B"], "Llama-3.1-8B");
    refused(&["--tokens", "64", "--model", "Qwen3-14B"], "give --layers");
    refused(&["--tokens", "64", "--layers", "4", "--only", "3-9"], "layer 9 of 4");
    refused(&["--tokens", "64", "--layers", "4", "--only", "x"], "5,7,15-35");
    refused(&["--tokens", "64", "--layers", "4", "--window", "0"], "1 or more");
    refused(&["--tokens", "64", "--layers", "4", "--heads", "3", "--kv-heads", "2"], "multiple");
    let wide = ["--layers", "1", "--heads", "65528", "--dim", "65535"];
    refused(&[&["--tokens", "1"], &wide[..]].concat(), "at most 1073741824");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("layer.safetensors");
    let path = file.to_str().unwrap();
    let data = numbers(1, 24);
    save(&file, &[("query", [2, 3, 4], &data)]);
    refused(&["--data", path, "--layers", "4"], "no tensor \"key\"");
    let key = ("key", [2, 3, 4], &data[..]);
    save(&file, &[("query", [2, 3, 4], &data), key, ("value", [4, 3, 2], &data)]);
    refused(
        &["--data", path, "--layers", "4"],
        "query [2, 3, 4], key [2, 3, 4], value [4, 3, 2]: [tokens, heads, dim] each, with as many keys and values as queries",
    );
    refused(&["--data", path, "--layers", "4", "--sequence", "0"], "--sequence 0");
    fs::write(&file, b"nothing").unwrap();
    refused(&["--data", path, "--layers", "4"], "not a safetensors file");
}

/// Two causal prompts of which the second is as long as the tensors, in a layout.
fn prompts(layout: &str) -> AttentionCase {
    let mut case = AttentionCase::new(layout, Default::default());
    let (heads, tokens, dim) = (2usize, [5usize, 9], 64usize);
    let shape = match layout {
        "BSH" => vec![2, tokens[1], heads * dim],
        "BNSD" => vec![2, heads, tokens[1], dim],
        _ => vec![tokens[0] + tokens[1], heads, dim],
    };
    let count: usize = shape.iter().product();
    for (seed, parameter) in [Parameter::Query, Parameter::Key, Parameter::Value].into_iter().enumerate() {
        let values = numbers(seed as u32, count);
        let tensor = CaseTensor::from_f32(DType::Bf16, &shape, &values).unwrap();
        case.arguments.set_tensor(parameter, tensor);
    }
    let lengths = match layout {
        "TND" => vec![5, 14],
        _ => vec![5, 9],
    };
    case.arguments.input_layout = layout.to_owned();
    case.arguments.num_heads = 2;
    case.arguments.num_key_value_heads = 2;
    case.arguments.inner_precise = 0;
    case.arguments.scale = 0.25;
    case.arguments.actual_seq_lengths = Some(lengths.clone());
    case.arguments.actual_seq_lengths_kv = Some(lengths);
    case.arguments.sparse_mode = 3;
    case.mask = MaskSource::Compressed;
    case
}

#[test]
fn a_sequence_of_a_case_is_taken_in_its_layout() {
    let folder = tempfile::tempdir().unwrap();
    let sizes = ["--layers", "2", "--sink", "1", "--window", "2", "--last", "1"];
    let of = |layout: &str, more: &[&str]| {
        let file = write(folder.path(), "case.safetensors", &prompts(layout));
        let found = found(&[&["--data", &file, "--runs", "1"], &sizes[..], more].concat());
        let sizes = (&found["tokens"], &found["heads"], &found["kv_heads"]);
        let sizes = sizes.0.as_u64().zip(sizes.1.as_u64());
        (sizes, found["difference"]["largest"].as_f64().unwrap())
    };
    for layout in ["BSH", "BNSD", "TND"] {
        assert_eq!(of(layout, &[]).0, Some((5, 2)), "{layout}");
        assert_eq!(of(layout, &["--sequence", "1"]).0, Some((9, 2)), "{layout}");
    }
    // BSH and TND hold the first sequence's rows alike.
    assert_eq!(of("BSH", &[]).1, of("TND", &[]).1);

    let at = |case: &AttentionCase, why: &str| {
        let file = write(folder.path(), "other.safetensors", case);
        refused(&["--data", &file, "--layers", "2"], why);
        refused(&["--data", &file, "--layers", "2"], "other.safetensors: ");
    };
    let mut case = prompts("BSH");
    (case.arguments.sparse_mode, case.mask) = (0, MaskSource::None);
    at(&case, "in layout BSH whose sequence 0 is not causal");
    let mut case = prompts("BSH");
    case.arguments.actual_seq_lengths_kv = Some(vec![7, 9]);
    at(&case, "has 5 queries and 7 keys");
    let file = write(folder.path(), "case.safetensors", &prompts("TND"));
    refused(&["--data", &file, "--layers", "2", "--sequence", "2"], "the case has 2, counted from 0");
    let plain = vectors("numeric/071_tnd_plain.safetensors");
    refused(
        &["--data", plain.to_str().unwrap(), "--layers", "2"],
        "071_tnd_plain.safetensors: a case in layout TND whose sequence 0 has 16 queries and 21 keys",
    );
    let gather = vectors("gather/nz_f16.safetensors");
    refused(&["--data", gather.to_str().unwrap(), "--layers", "2"], "only those of FusedInferAttentionScore");
}

/// Tensors of a recorded layer: query of two heads, key and value of one, and the gradient of the output.
fn recorded(layer: usize, seed: u32, tokens: usize) -> Vec<(String, [usize; 3], Vec<f32>)> {
    let parts = [("query", 2), ("key", 1), ("value", 1), ("output_gradient", 2)];
    let tensor = |((name, heads), at): ((&str, usize), u32)| {
        let numbers = numbers(seed.wrapping_mul(97).wrapping_add(at), tokens * heads * 4);
        (format!("layers.{layer}.{name}"), [tokens, heads, 4], numbers)
    };
    parts.into_iter().zip(0u32..).map(tensor).collect()
}

fn save_recorded(file: &Path, tensors: &[(String, [usize; 3], Vec<f32>)]) {
    let tensors: Vec<_> = tensors.iter().map(|(name, shape, data)| (name.as_str(), *shape, &data[..])).collect();
    save(file, &tensors);
}

/// The sums over the middle of `|dO Vᵀ|` and of the attention, the mean over both heads.
fn middle(tensors: &[(String, [usize; 3], Vec<f32>)], sees: impl Fn(usize, usize) -> bool) -> [f64; 2] {
    let [query, key, value, gradient] = [0, 1, 2, 3].map(|at| &tensors[at].2);
    let tokens = tensors[0].1[0];
    let dot = |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(x, y)| f64::from(x * y)).sum() };
    let (mut sum, mut mass) = (0.0, 0.0);
    for (row, head) in (0..tokens).flat_map(|row| [(row, 0), (row, 1)]) {
        let of_head = |all: &[f32]| all[(row * 2 + head) * 4..][..4].to_vec();
        let of_key = |all: &[f32], j: usize| all[j * 4..][..4].to_vec();
        let weights = (0..=row).map(|j| (dot(&of_head(query), &of_key(key, j)) / 2.0).exp());
        let weights: Vec<f64> = weights.collect();
        let all: f64 = weights.iter().sum();
        for j in (0..=row).filter(|j| !sees(row, *j)) {
            sum += dot(&of_head(gradient), &of_key(value, j)).abs() / 2.0;
            mass += weights[j] / all / (2.0 * tokens as f64);
        }
    }
    [sum, mass]
}

#[test]
fn layers_are_chosen_by_what_their_middle_contributes() {
    let folder = tempfile::tempdir().unwrap();
    let files = [("a", 40usize), ("b", 33)].map(|(name, tokens)| (folder.path().join(name), tokens));
    let mut want = [[0.0; 2]; 3];
    for (at, (file, tokens)) in files.iter().enumerate() {
        let layers: Vec<_> = (0..3).map(|layer| recorded(layer, (layer + 5 * at) as u32, *tokens)).collect();
        for (sums, layer) in want.iter_mut().zip(&layers) {
            let sees = |i: usize, j: usize| j < 2 || i - j < 9 || i + 8 >= *tokens;
            let middle = middle(layer, sees);
            sums.iter_mut().zip(middle).for_each(|(sum, own)| *sum += own / 2.0);
        }
        save_recorded(file, &layers.concat());
    }
    let [first, second] = files.each_ref().map(|(file, _)| file.to_str().unwrap());
    let sizes = ["--sink", "2", "--window", "9", "--last", "8"];
    let analyse = |more: &[&str]| found(&[&["analyse", first, second][..], &sizes, more].concat());
    for (at, measured) in [analyse(&[]), analyse(&["--by", "mass"])].iter().enumerate() {
        let mut order = vec![0usize, 1, 2];
        order.sort_by(|a, b| want[*a][at].total_cmp(&want[*b][at]));
        assert_eq!(measured["order"], json!(order), "{want:?}");
        assert_eq!(measured["triangle_layers"], json!([order[0]]), "half of three layers is one");
        for (layer, want) in want.iter().enumerate() {
            let got = measured["contributions"][layer]["middle"].as_f64().unwrap();
            assert!(abs_diff_eq!(got, want[at], epsilon = 1e-5 * want[at]), "{got}, expected {}", want[at]);
        }
        assert_eq!(measured["tokens"], json!([40, 33]));
    }
    assert_eq!(analyse(&["--count", "3"])["triangle_layers"], json!([0, 1, 2]));

    let output = triangle(&[&["analyse", first, "--count", "2"][..], &sizes].concat());
    let said = text(&output.stdout);
    let next = said.lines().last().unwrap().strip_prefix("what that saves: ascend-attn triangle ").unwrap();
    let saved = found(&next.split(' ').chain(["--measure", "never"]).collect::<Vec<_>>());
    assert_eq!(saved["triangle_layers"].as_array().unwrap().len(), 2);
    assert_eq!((&saved["num_sink_tokens"], &saved["sliding_window_size"]), (&json!(2), &json!(8)));
    assert_eq!((&saved["heads"], &saved["kv_heads"], &saved["dim"]), (&json!(2), &json!(1), &json!(4)));
}

#[test]
fn recorded_layers_that_cannot_be_compared_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("layers.safetensors");
    let path = file.to_str().unwrap();
    let sizes = ["--sink", "2", "--window", "9", "--last", "8"];
    let refuses = |tensors: &[(String, [usize; 3], Vec<f32>)], more: &[&str], why: &str| {
        save_recorded(&file, tensors);
        refused(&[&["analyse", path][..], &sizes, more].concat(), why);
    };
    let layer = |at: usize| recorded(at, at as u32, 40);
    refuses(&layer(1), &[], "no tensor of layer 0");
    refuses(&[layer(0), layer(2)].concat(), &[], "no tensor of layer 1");
    refuses(&[layer(0), recorded(1, 1, 39)].concat(), &[], "39 tokens in layer 1, and 40 in layer 0");
    refuses(&recorded(0, 0, 19), &[], "prompts of up to 19 tokens have no middle");
    refuses(&[layer(0), layer(1)[..3].to_vec()].concat(), &[], "layers.1.output_gradient");
    refuses(&layer(0)[..3], &["--by", "score-gradient"], "--by mass");
    refuses(&layer(0)[1..], &[], "layers.0.query");
    refuses(&layer(0), &["--count", "2"], "--count 2: the files have 1 layers");
    let mut other = layer(0);
    other[3].1 = [40, 1, 8];
    refuses(&other, &[], "the shape of the query");
    other[3] = ("layers.0.bias".to_owned(), [40, 1, 8], other[3].2.clone());
    refuses(&other, &[], "layers.0.bias");
    other[3].0 = "bias".to_owned();
    refuses(&other, &[], "names are layers.N.query");
    save_recorded(&file, &layer(0));
    let second = folder.path().join("second");
    save_recorded(&second, &[layer(0), layer(1)].concat());
    refused(&[&["analyse", path, second.to_str().unwrap()][..], &sizes].concat(), "2 layers, and 1 in");
    refused(&["analyse", path, "--tokens", "64"], "--tokens");
    refused(&["analyse"], "FILE");
}
