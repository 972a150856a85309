//! Which rules and lints may answer for which field.

/// Fields, the ways in which they are made wrong, and the ids that may answer; `unsupported` is the typed refusal.
///
/// Most rules compare fields with each other, so that several may be the first to see a wrong one: every id here is
/// that of a condition of which the field is a part.
pub const TABLE: &[(&str, &str, &str)] = &[
    // Tensors that every call has.
    ("query key value attention_out", "null", "call.required"),
    (
        "query",
        "dtype",
        "dtype.registered attention_out.dtype key.dtype_of_query quant.int8_query \
        quant.int8_query_decode quant.half_query antiquant.scale_required mla.full_quant head_dim.aligned",
    ),
    ("query", "rank", "query.rank"),
    (
        "query",
        "empty",
        "query.empty_output attention_out.shape num_heads.query head_dim.equal softmax_lse.shape rope.layout learnable_sink.head_dim",
    ),
    (
        "query",
        "longer shorter",
        "attention_out.shape attention_out.shape_unchecked softmax_lse.shape \
        softmax_lse.unchecked head_dim.equal head_dim.aligned head_dim.max num_heads.query query.hidden_size key.batch \
        key.list_batch key.list_length actual_seq_lengths_kv.count atten_mask.full_shape rope.layout \
        learnable_sink.head_dim shape.countable",
    ),
    ("key", "dtype", "dtype.registered value.dtype_of_key head_dim.aligned mla.quantised_cache"),
    ("key value", "count", "key.list_ignored key.list_length packed.alone "),
    (
        "key value",
        "rank",
        "key.rank cache.rank cache.shape cache.layout key.list_batch value.shape_of_key \
        head_dim.equal rope.absorbed_dims mla.cache antiquant.scale_shape attention_out.shape unsupported",
    ),
    (
        "key value",
        "empty longer shorter",
        "value.shape_of_key value.shape_unchecked packed.value_rows key.batch \
        key.list_batch key.list_length head_dim.equal num_key_value_heads.key cache.shape mla.cache rope.absorbed_dims \
        rope.prefill_dims packed.head_dim packed.kv_ends shape.countable quant.int8_query_empty",
    ),
    (
        "key",
        "empty longer shorter",
        "actual_seq_lengths_kv.range atten_mask.full_shape pse_shift.shape \
        antiquant.scale_shape",
    ),
    ("value", "dtype", "dtype.registered value.dtype_of_key rope.dtype"),
    ("value", "empty longer shorter", "attention_out.shape unsupported"),
    (
        "attention_out",
        "dtype",
        "dtype.registered attention_out.dtype quant_scale2.required quant_scale2.unused \
        quant.half_output mla.output packed.alone head_dim.aligned",
    ),
    ("attention_out", "empty longer shorter rank", "attention_out.shape attention_out.shape_unchecked shape.countable"),
    ("softmax_lse", "null", "softmax_lse.required softmax_lse.unchecked"),
    ("softmax_lse", "dtype", "softmax_lse.dtype softmax_lse.unchecked"),
    ("softmax_lse", "empty longer shorter rank", "softmax_lse.shape softmax_lse.unchecked shape.countable"),
    ("query key value attention_out softmax_lse atten_mask", "negative", "shape.countable"),
    ("query key value attention_out softmax_lse atten_mask", "strided", "tensor.strided"),
    ("query key value attention_out atten_mask pse_shift", "format", "format.plain"),
    // Mask and bias.
    ("atten_mask", "null", "atten_mask.required packed.sparse_mode mla.sparse_mode"),
    ("atten_mask", "given", "packed.sparse_mode mla.sparse_mode"),
    ("atten_mask", "dtype", "dtype.registered"),
    ("atten_mask", "empty", "atten_mask.required mla.sparse_mode tokens.without_mask"),
    (
        "atten_mask",
        "longer shorter rank",
        "atten_mask.compressed_shape atten_mask.full_shape \
        atten_mask.full_shape_decode atten_mask.head_axis mla.sparse_mode shape.countable",
    ),
    ("pse_shift", "given", "packed.alone mla.alone"),
    ("pse_shift", "dtype", "dtype.registered pse_shift.dtype"),
    ("pse_shift", "longer shorter negative rank", "pse_shift.shape"),
    // Pages.
    ("block_table", "null", "key.rank key.batch key.list_length num_key_value_heads.key mla.paged "),
    (
        "block_table",
        "given",
        "block_size.prefill block_size.decode actual_seq_lengths_kv.range shared_prefix.alone \
        padding_size.alone attention_out.shape",
    ),
    ("block_table", "dtype rank longer", "block_table.shape block_table.empty"),
    (
        "block_table",
        "empty negative shorter rank",
        "block_table.shape block_table.empty actual_seq_lengths_kv.range \
        packed.kv_range",
    ),
    (
        "block_size",
        "value",
        "block_size.prefill block_size.decode mla.block_size cache.shape packed.kv_range \
        actual_seq_lengths_kv.range antiquant.scale_shape",
    ),
    // Left padding.
    (
        "query_padding_size kv_padding_size",
        "given",
        "padding_size.lengths padding_size.alone padding_size.decode \
        mla.alone",
    ),
    ("query_padding_size kv_padding_size", "rank empty longer negative", "padding_size.shape"),
    // Shared prefix.
    (
        "key_shared_prefix value_shared_prefix",
        "null given",
        "shared_prefix.pair padding_size.alone padding_size.decode \
        mla.alone",
    ),
    ("key_shared_prefix value_shared_prefix", "dtype", "shared_prefix.dtype unsupported"),
    ("key_shared_prefix value_shared_prefix", "rank empty longer shorter negative", "shared_prefix.shape"),
    ("actual_shared_prefix_len", "value", "shared_prefix.length mla.alone"),
    // Rotary parts and sink.
    ("query_rope key_rope", "null given", "rope.pair"),
    ("query_rope key_rope", "dtype", "rope.dtype"),
    ("query_rope", "rank empty longer shorter negative", "rope.shape rope.absorbed_dims rope.prefill_dims"),
    ("key_rope", "rank empty longer shorter negative", "mla.cache rope.prefill_dims"),
    ("learnable_sink", "given", "learnable_sink.layout learnable_sink.head_dim"),
    ("learnable_sink", "dtype", "learnable_sink.dtype"),
    ("learnable_sink", "rank longer shorter negative", "learnable_sink.shape"),
    // Quantised query and output.
    ("deq_scale1 quant_scale1 deq_scale2", "null empty negative", "quant.int8_query"),
    ("deq_scale1 quant_scale1 deq_scale2", "given", "quant.half_query mla.alone"),
    ("quant_scale2", "null", "quant_scale2.required"),
    ("quant_scale2 quant_offset2", "given", "quant_scale2.unused quant.half_output mla.alone"),
    ("quant_scale2", "dtype", "quant_scale2.dtype quant_offset2.like_scale"),
    ("quant_scale2", "rank empty longer shorter negative", "quant_scale2.size quant_offset2.like_scale"),
    ("quant_offset2", "dtype rank empty longer shorter negative", "quant_offset2.like_scale"),
    ("dequant_scale_query", "given", "dequant_scale_query.unused mla.alone"),
    ("query_quant_mode", "value", "dequant_scale_query.unused mla.alone"),
    // Quantised keys and values.
    ("antiquant_scale", "null", "antiquant.scale_required"),
    ("key_antiquant_scale value_antiquant_scale key_antiquant_offset value_antiquant_offset", "null", "antiquant.pair"),
    (
        "antiquant_scale key_antiquant_scale value_antiquant_scale antiquant_offset key_rope_antiquant_scale",
        "given",
        "antiquant.unused mla.alone",
    ),
    ("key_antiquant_offset value_antiquant_offset", "given", "antiquant.pair antiquant.unused mla.alone"),
    (
        "antiquant_scale key_antiquant_scale value_antiquant_scale",
        "dtype",
        "antiquant.scale_dtype antiquant.offset_like_scale",
    ),
    (
        "antiquant_scale key_antiquant_scale value_antiquant_scale",
        "rank empty longer shorter negative",
        "antiquant.scale_shape antiquant.offset_like_scale unsupported",
    ),
    (
        "antiquant_offset key_antiquant_offset value_antiquant_offset",
        "dtype rank empty longer shorter negative",
        "antiquant.offset_like_scale",
    ),
    ("antiquant_mode", "value", "antiquant_mode.unused antiquant.modes antiquant.scale_dtype mla.alone "),
    (
        "key_antiquant_mode value_antiquant_mode",
        "value",
        "antiquant.modes antiquant.mixed_modes antiquant.scale_shape antiquant.scale_dtype mla.alone",
    ),
    // Heads, layout and modes.
    (
        "num_heads",
        "value",
        "num_heads.positive num_heads.query num_key_value_heads.group query.hidden_size head_dim.equal \
        rope.absorbed_dims learnable_sink.shape softmax_lse.shape attention_out.shape",
    ),
    (
        "num_key_value_heads",
        "value",
        "num_key_value_heads.range num_key_value_heads.divides num_key_value_heads.key \
        head_dim.equal mla.kv_heads cache.shape rope.absorbed_dims attention_out.shape",
    ),
    (
        "input_layout",
        "value",
        "input_layout.known input_layout.bnsd_bsnd_rows query.rank num_heads.query \
        num_key_value_heads.key head_dim.equal key.batch cache.shape attention_out.shape softmax_lse.shape rope.layout \
        learnable_sink.layout antiquant_mode.unused",
    ),
    (
        "sparse_mode",
        "value",
        "sparse_mode.known sparse_mode.without_mask atten_mask.required \
        atten_mask.compressed_shape atten_mask.compressed_shape_decode packed.sparse_mode mla.sparse_mode \
        mla.block_size atten_mask.full_shape",
    ),
    ("pre_tokens next_tokens", "value", "tokens.without_mask tokens.both_negative tokens.empty_band packed.band"),
    ("inner_precise", "value", "inner_precise.known inner_precise.meaning mla.inner_precise"),
    ("softmax_lse_flag", "value", "softmax_lse.required softmax_lse.unchecked mla.softmax_lse"),
    ("pse_type", "value", "call.product"),
    // Lengths.
    (
        "actual_seq_lengths",
        "null count",
        "packed.lengths_required actual_seq_lengths.count \
        actual_seq_lengths.ignored mla.lengths",
    ),
    (
        "actual_seq_lengths",
        "value",
        "actual_seq_lengths.range actual_seq_lengths.ignored packed.q_ends packed.q_total \
        mla.lengths mla.rows",
    ),
    ("actual_seq_lengths_kv", "null", "packed.lengths_required actual_seq_lengths_kv.required mla.lengths"),
    (
        "actual_seq_lengths_kv",
        "count",
        "packed.lengths_required actual_seq_lengths_kv.count \
        actual_seq_lengths_kv.range ",
    ),
    ("actual_seq_lengths_kv", "value", "actual_seq_lengths_kv.range packed.kv_ends packed.kv_range"),
    // What the operator does not look at.
    (
        "pse_shift block_table deq_scale1 quant_scale1 deq_scale2 quant_scale2 quant_offset2 antiquant_scale antiquant_offset \
        key_antiquant_scale key_antiquant_offset value_antiquant_scale value_antiquant_offset query_padding_size \
        kv_padding_size key_shared_prefix value_shared_prefix query_rope key_rope dequant_scale_query learnable_sink \
        softmax_lse",
        "format",
        "tensor.format",
    ),
    (
        "pse_shift block_table deq_scale1 quant_scale1 deq_scale2 quant_scale2 quant_offset2 antiquant_scale antiquant_offset \
        key_antiquant_scale key_antiquant_offset value_antiquant_scale value_antiquant_offset query_padding_size \
        kv_padding_size key_shared_prefix value_shared_prefix query_rope key_rope dequant_scale_query learnable_sink \
        softmax_lse",
        "strided",
        "tensor.strided",
    ),
    ("atten_mask pse_shift learnable_sink quant_offset2 kv_padding_size", "empty", "tensor.empty"),
    (
        "actual_seq_lengths actual_seq_lengths_kv",
        "count",
        "actual_seq_lengths.surplus actual_seq_lengths.ignored actual_seq_lengths_kv.empty",
    ),
    ("actual_shared_prefix_len", "value", "shared_prefix.length_ignored"),
    (
        "antiquant_mode key_antiquant_mode value_antiquant_mode query_quant_mode",
        "value",
        "antiquant_mode.ignored antiquant_mode.merged",
    ),
    (
        "antiquant_scale antiquant_offset key_antiquant_scale key_antiquant_offset value_antiquant_scale value_antiquant_offset",
        "given",
        "antiquant.ignored",
    ),
    ("antiquant_scale antiquant_offset value_antiquant_scale", "dtype", "antiquant.dtype_unchecked"),
    ("value_antiquant_scale", "rank longer negative", "antiquant.value_scale_unchecked"),
    ("key_rope_antiquant_scale", "given", "key_rope_antiquant_scale.ignored"),
    ("attention_out", "dtype", "quant_scale2.ignored"),
    ("quant_scale2 quant_offset2", "given", "quant_scale2.ignored"),
    ("quant_scale2 quant_offset2", "dtype", "quant_scale2.half"),
    ("deq_scale1 quant_scale1 deq_scale2", "given", "deq_scale.ignored"),
    ("deq_scale1 quant_scale1 deq_scale2", "dtype longer", "deq_scale.unchecked"),
    ("block_table", "dtype rank longer shorter negative", "block_table.unchecked"),
    ("key", "rank longer shorter", "cache.shape_unchecked cache.value_unchecked"),
    ("value", "longer shorter", "cache.value_unchecked"),
    ("block_size num_key_value_heads", "value", "cache.shape_unchecked"),
    ("query_rope key_rope", "dtype", "rope.dtype_unchecked"),
    ("key_shared_prefix value_shared_prefix", "dtype", "shared_prefix.dtype_unchecked"),
    ("query_padding_size kv_padding_size", "given", "padding_size.ignored"),
    ("query_padding_size kv_padding_size", "dtype rank empty longer negative", "padding_size.unchecked"),
    ("pse_shift", "given", "pse_shift.ignored"),
    ("sparse_mode", "value", "sparse_mode.unchecked sparse_mode.left_up_decode sparse_mode.wide"),
    ("input_layout", "value", "input_layout.prefill input_layout.heads_first"),
    ("pse_shift block_table key_antiquant_scale value_antiquant_scale", "longer", "tensor.countable"),
];
