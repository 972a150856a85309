//! A model from a GGUF file: architecture `llama`, with weights in F32, F16, Q4_1 and Q8_0.

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;

use ascend_attention::f16;
use ascend_serving::Causality;

use super::model::{Config, Layer, Linear, Model};
use super::text::Vocabulary;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Appends the numbers that bytes stand for.
type Read = fn(&[u8], &mut Vec<f32>);

/// A value of the file's header. Integers of every size are one kind here, and so are floating point numbers.
enum Value {
    Integer(u64),
    Real(f64),
    Text(String),
    List(Vec<Value>),
}

/// A tensor of the file: its elements, their type and its offset behind the header.
struct Entry {
    elements: usize,
    kind: u32,
    offset: usize,
}

/// The header of a file, and the data behind it.
struct File<'a> {
    header: HashMap<String, Value>,
    tensors: HashMap<String, Entry>,
    data: &'a [u8],
}

/// The model in a file, and the words that its tokens stand for.
pub fn load(path: &Path) -> Result<(Model, Vocabulary)> {
    let bytes = std::fs::read(path)?;
    let file = File::parse(&bytes)?;
    let vocabulary = Vocabulary::new(file.texts("tokenizer.ggml.tokens")?, &file.texts("tokenizer.ggml.merges")?);
    if file.text("general.architecture")? != "llama" {
        return Err("the file's model is of another architecture than `llama`".into());
    }
    let width = file.integer("llama.embedding_length")?;
    let heads = file.integer("llama.attention.head_count")?;
    let kv_heads = file.integer("llama.attention.head_count_kv")?;
    let hidden = file.integer("llama.feed_forward_length")?;
    let head_dim = file.integer("llama.rope.dimension_count")?;
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) || heads * head_dim != width {
        return Err(format!("{heads} heads of {head_dim} over {kv_heads} make no model").into());
    }
    let config = Config {
        vocabulary: vocabulary.size(),
        width,
        heads,
        kv_heads,
        head_dim,
        hidden,
        layers: vec![Causality::Causal; file.integer("llama.block_count")?],
        theta: file.real("llama.rope.freq_base")?,
        epsilon: file.real("llama.attention.layer_norm_rms_epsilon")?,
    };
    let layer = |at: usize| -> Result<Layer> {
        let name = |part: &str| format!("blk.{at}.{part}.weight");
        let linear = |part, inputs, outputs| file.linear(&name(part), inputs, outputs);
        Ok(Layer {
            attention_norm: file.weights(&name("attn_norm"), width)?,
            query: linear("attn_q", width, width)?,
            key: linear("attn_k", width, kv_heads * head_dim)?,
            value: linear("attn_v", width, kv_heads * head_dim)?,
            output: linear("attn_output", width, width)?,
            feed_norm: file.weights(&name("ffn_norm"), width)?,
            gate: linear("ffn_gate", width, hidden)?,
            up: linear("ffn_up", width, hidden)?,
            down: linear("ffn_down", hidden, width)?,
        })
    };
    let model = Model {
        embedding: file.linear("token_embd.weight", width, vocabulary.size())?,
        layers: (0..config.layers.len()).map(layer).collect::<Result<_>>()?,
        norm: file.weights("output_norm.weight", width)?,
        config,
    };
    Ok((model, vocabulary))
}

impl<'a> File<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self> {
        let mut reader = Reader { bytes, at: 0 };
        if reader.take(4)? != b"GGUF" || reader.integer(4)? != 3 {
            return Err("not a GGUF file of version 3".into());
        }
        let tensor_count = reader.integer(8)?;
        let value_count = reader.integer(8)?;
        let mut header = HashMap::new();
        for _ in 0..value_count {
            let name = reader.text()?;
            let kind = reader.integer(4)?;
            header.insert(name, reader.value(kind)?);
        }
        let mut tensors = HashMap::new();
        for _ in 0..tensor_count {
            let name = reader.text()?;
            let mut elements = 1usize;
            for _ in 0..reader.integer(4)? {
                let size = usize::try_from(reader.integer(8)?)?;
                elements = elements.checked_mul(size).ok_or("a tensor too large")?;
            }
            let kind = reader.integer(4)? as u32;
            let offset = usize::try_from(reader.integer(8)?)?;
            let entry = Entry { elements, kind, offset };
            tensors.insert(name, entry);
        }
        let begin = reader.at.next_multiple_of(32);
        let data = bytes.get(begin..).ok_or("the file ends early")?;
        Ok(Self { header, tensors, data })
    }

    fn value(&self, name: &str) -> Result<&Value> {
        Ok(self.header.get(name).ok_or_else(|| format!("no {name}"))?)
    }

    fn integer(&self, name: &str) -> Result<usize> {
        match self.value(name)? {
            Value::Integer(value) => Ok(usize::try_from(*value)?),
            _ => Err(format!("{name} is no integer").into()),
        }
    }

    fn real(&self, name: &str) -> Result<f64> {
        match self.value(name)? {
            Value::Real(value) => Ok(*value),
            _ => Err(format!("{name} is no real number").into()),
        }
    }

    fn text(&self, name: &str) -> Result<&str> {
        match self.value(name)? {
            Value::Text(text) => Ok(text),
            _ => Err(format!("{name} is no text").into()),
        }
    }

    fn texts(&self, name: &str) -> Result<Vec<String>> {
        let Value::List(values) = self.value(name)? else {
            return Err(format!("{name} is no list").into());
        };
        let texts = values.iter().map(|value| match value {
            Value::Text(text) => Ok(text.clone()),
            _ => Err(format!("{name} is no list of texts").into()),
        });
        texts.collect()
    }

    fn linear(&self, name: &str, inputs: usize, outputs: usize) -> Result<Linear> {
        let weights = self.weights(name, inputs * outputs)?;
        Ok(Linear { inputs, weights })
    }

    /// The numbers of a tensor, whatever they are stored as.
    fn weights(&self, name: &str, elements: usize) -> Result<Vec<f32>> {
        let entry = self.tensors.get(name).ok_or_else(|| format!("no {name}"))?;
        // Elements and bytes of what is stored together, and how to read it.
        let (together, bytes, read): (usize, usize, Read) = match entry.kind {
            0 => (1, 4, |b, out| out.push(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
            1 => (1, 2, |b, out| out.push(half(b))),
            3 => (32, 20, q4_1),
            8 => (32, 34, q8_0),
            kind => return Err(format!("{name} is stored in a way not known here: {kind}").into()),
        };
        if entry.elements != elements || !elements.is_multiple_of(together) {
            return Err(format!("{name} has {} numbers, not {elements}", entry.elements).into());
        }
        let data = self.data.get(entry.offset..);
        let data = data.and_then(|data| data.get(..elements / together * bytes));
        let mut weights = Vec::with_capacity(elements);
        for block in data.ok_or("the file ends early")?.chunks_exact(bytes) {
            read(block, &mut weights);
        }
        Ok(weights)
    }
}

fn half(bytes: &[u8]) -> f32 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// 32 numbers: a factor, a least number, and 16 bytes of which the low halves come first.
fn q4_1(block: &[u8], out: &mut Vec<f32>) {
    let (factor, least) = (half(block), half(&block[2..]));
    let low = block[4..].iter().map(|byte| byte & 15);
    let high = block[4..].iter().map(|byte| byte >> 4);
    out.extend(low.chain(high).map(|steps| factor * f32::from(steps) + least));
}

/// 32 numbers: a factor and as many signed bytes.
fn q8_0(block: &[u8], out: &mut Vec<f32>) {
    let factor = half(block);
    out.extend(block[2..].iter().map(|byte| factor * f32::from(*byte as i8)));
}

/// Reads a header from front to back.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let taken = rest.get(..count).ok_or("the file ends early")?;
        self.at += count;
        Ok(taken)
    }

    /// An unsigned integer of up to eight bytes, the least significant first.
    fn integer(&mut self, bytes: usize) -> Result<u64> {
        let bytes = self.take(bytes)?.iter().rev();
        Ok(bytes.fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    fn text(&mut self) -> Result<String> {
        let length = usize::try_from(self.integer(8)?)?;
        Ok(String::from_utf8(self.take(length)?.to_vec())?)
    }

    fn value(&mut self, kind: u64) -> Result<Value> {
        Ok(match kind {
            0 | 1 | 7 => Value::Integer(self.integer(1)?),
            2 | 3 => Value::Integer(self.integer(2)?),
            4 | 5 => Value::Integer(self.integer(4)?),
            6 => Value::Real(f32::from_bits(self.integer(4)? as u32).into()),
            8 => Value::Text(self.text()?),
            9 => {
                let kind = self.integer(4)?;
                let count = self.integer(8)?;
                if kind == 9 {
                    return Err("a list of lists in the header".into());
                }
                Value::List((0..count).map(|_| self.value(kind)).collect::<Result<_>>()?)
            }
            10 | 11 => Value::Integer(self.integer(8)?),
            12 => Value::Real(f64::from_bits(self.integer(8)?)),
            kind => return Err(format!("a header value of kind {kind}").into()),
        })
    }
}
