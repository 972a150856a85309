//! Rules whose fix is words alone, by the reason.

/// A reason, and the rules that it is that of.
pub(super) const WORDS: &[(&str, &str)] = &[
    (
        "ATB's operations are no calls of `aclnn`, whose arguments a fix changes",
        "atb.dtype atb.format atb.given atb.head_size atb.heads atb.keys atb.length_pairs atb.lengths atb.mask atb.prefix \
         atb.product atb.query atb.rows atb.scale atb.skipped_keys atb.squares atb.table atb.triangle",
    ),
    (
        "another entry point, product or release is needed",
        "batch_mat_mul.cube_math_type batch_mat_mul.ignored_cube_math_type batch_mat_mul.product call.entry_point \
         call.product flash.entry_point flash.packed_without_lengths gather.product incre.card_heads \
         incre.deprecated incre.product indexer.product indexer.product_unchecked incre.pse_dropped \
         incre.rows incre.successor packed.lengths_data \
         prompt.deprecated prompt.product prompt.pse_dropped prompt.successor version.deprecated ring.entry_point rms_norm.product \
         scatter.product update.product update_type.known sparse_flash.product sparse_flash.sinks block_sparse.layout_bsnd \
         block_sparse.product quant_sparse_flash.product quant_indexer.product recurrent_delta.product \
         chunk_delta.product causal_conv.product fused_conv.product nsa_compress.product nsa_compress_with_cache.product nsa_compress_attention.product \
         nsa_selected_attention.product",
    ),
    (
        "the work has to be cut into other calls, or left out",
        "antiquant.rows batch_mat_mul.empty_batch flash.documented_limits flash.head_dim_max flash.lengths_all_zero \
         flash.padded_tail flash.start_index_first flash.tail_unwritten gather.token_bytes head_dim.max \
         incre.card_size indexer.count_unchecked indexer.empty indexer.heads indexer.heads_unchecked indexer.none_chosen \
         key.list_max key.list_most num_heads.full_quant num_heads.max num_heads.max_decode \
         num_key_value_heads.group prompt.card_size quant.int8_query_empty query.batch_max query.batch_unaligned \
         query.empty_decode ring.countable rms_norm.row_bytes rope.dims sparse_flash.heads sparse_flash.none_chosen update.count \
         block_sparse.work quant_sparse_flash.heads quant_sparse_flash.none_chosen \
         quant_indexer.heads quant_indexer.none_chosen recurrent_delta.heads recurrent_delta.dims \
         causal_conv.empty causal_conv.width fused_conv.rows fused_conv.sequences fused_conv.width recurrent_delta.empty chunk_delta.heads chunk_delta.dims chunk_delta.empty nsa_compress.heads \
         nsa_compress_with_cache.heads nsa_compress_attention.batch nsa_selected_attention.batch \
         nsa_compress_with_cache.empty nsa_compress_attention.compressed nsa_compress_attention.short nsa_selected_attention.short \
         nsa_compress_attention.head_dim",
    ),
    (
        "an argument has to go, and with it what its caller meant by it, which the call does not say",
        "causal_conv.accepted causal_conv.history fused_conv.unread \
         actual_seq_lengths.ignored actual_seq_lengths.surplus antiquant.alone antiquant.ignored antiquant.unused \
         atten_mask.head_axis block_table.alone block_table.unified_alone compress_lens.unused deq_scale.ignored \
         flash.atten_mask_rank flash.prefix_unread flash.pse_cut flash.pse_empty_sequence flash.start_index_unread \
         flash.tensor_empty indexer.values_paged \
         key_rope_antiquant_scale.ignored learnable_sink.alone learnable_sink.combined mla.alone \
         packed.alone padding_size.ignored portable.meaning prompt.card_pse pse_shift.ignored quant.alone \
         quant.half_output quant.half_query quant.left_over quant.unused quant_offset2.rows \
         quant_scale2.half_output quant_scale2.ignored quant_scale2.unused ring.both_empty ring.one_empty \
         ring.softmax_layout_unread rope.alone shared_prefix.length_ignored slot_mapping.negative \
         split_fuse.ignored start_idx.ignored sparse_flash.sinks_paged sparse_flash.softmax_paged tensor.empty block_sparse.reserved \
         quant_sparse_flash.scales_unread recurrent_delta.gk nsa_compress_attention.mask_unread \
         nsa_selected_attention.mask_unread nsa_compress_attention.reserved",
    ),
    (
        "several dtypes would do, and which numbers are lost is for the caller to say",
        "antiquant.dtype_of_mode antiquant.dtype_unchecked antiquant.modes_of_dtype antiquant.query_dtype \
         antiquant.scale_dtype atten_mask.dtype_registered attention_out.quantised batch_mat_mul.dtype \
         batch_mat_mul.float_units batch_mat_mul.mixed_dtypes batch_mat_mul.out_dtype dtype.registered flash.dtype \
         flash.out_dtype flash.pse_dtype flash.pse_slopes flash.rope_dtype flash.sink_dtype flash.sink_dtype_slopes \
         fp8.form gather.dtype gather.index_dtype gather.same_dtype indexer.dtype \
         indexer.weights_950 key.dtype_of_query key.list_dtype learnable_sink.dtype \
         learnable_sink.dtype_of_target mla.output mla.quantised_cache mxfp8.form prompt.card_mask_dtype prompt.card_tokens \
         prompt.dtype prompt.mask_dtype prompt.out_dtype prompt.pse_dtype pse_shift.dtype quant.per_tensor \
         quant_scale2.dtype quant_scale2.half ring.both_masked ring.dtype ring.softmax_dtype ring.softmax_dtypes \
         rope.dtype rope.dtype_unchecked scatter.dtype scatter.same_dtype shared_prefix.dtype \
         shared_prefix.dtype_unchecked shared_prefix.output slot_mapping.dtype rms_norm.dtype sparse_flash.dtype split_fuse.dtype \
         split_fuse.sink update.local_out_dtype update.lse_dtype value.dtype_of_key block_sparse.dtype \
         quant_sparse_flash.dtype quant_indexer.dtype recurrent_delta.dtype chunk_delta.dtype causal_conv.dtype fused_conv.dtype nsa_compress.dtype \
         nsa_compress_with_cache.dtype nsa_compress_attention.dtype nsa_selected_attention.dtype",
    ),
    (
        "tensors or numbers are needed that the call does not have",
        "sparse_flash.no_softmax_v2 sparse_flash.sinks_shape actual_seq_lengths.count actual_seq_lengths_kv.count actual_seq_lengths_kv.empty \
         actual_seq_lengths_kv.required antiquant.head_dim antiquant.modes antiquant.nz_heads \
         antiquant.offset_like_scale antiquant.packed_nz antiquant.packed_nz_null antiquant.pair antiquant.prefill \
         antiquant.scale_required antiquant.scale_shape antiquant.shape_of_mode antiquant.split_offsets \
         antiquant.split_scales antiquant.value_scale_unchecked antiquant_mode.merged atten_mask.compressed_shape \
         atten_mask.full_shape atten_mask.full_shape_decode atten_mask.padded_keys atten_mask.row_each \
         attention_out.shape_unchecked batch_mat_mul.batch batch_mat_mul.format batch_mat_mul.out_shape \
         batch_mat_mul.rank batch_mat_mul.reduced_axis batch_mat_mul.required block_size.decode block_size.ignored \
         block_size.prefill block_size.quantised block_size.unified block_table.empty block_table.packed_rows \
         block_sparse.batch block_sparse.block_shape block_sparse.contents block_sparse.format block_sparse.head_dim \
         block_sparse.heads block_sparse.heads_unchecked block_sparse.kv_heads block_sparse.length_most \
         block_sparse.length_range block_sparse.length_sum block_sparse.lengths block_sparse.mask block_sparse.mask_rank \
         block_sparse.mask_unchecked block_sparse.out block_sparse.rank block_sparse.required block_sparse.rows_without_keys \
         block_sparse.scale_finite block_sparse.scale_inverse block_sparse.scale_zero block_sparse.softmax_lse \
         block_sparse.value_batch block_sparse.value_dim block_sparse.value_rows \
         block_table.range block_table.rank block_table.rows block_table.shape block_table.unchecked cache.blocks \
         cache.blocks_unchecked cache.copied cache.hidden_size cache.hidden_size_unchecked cache.hidden_size_unified \
         cache.layout cache.nz_head_dim cache.rank cache.shape cache.shape_unchecked cache.unified_shape \
         cache.value_unchecked call.required deq_scale.unchecked flash.atten_mask_compressed flash.atten_mask_loose \
         flash.atten_mask_packed flash.atten_mask_shape flash.countable flash.cut_sequence flash.drop_mask_dtype \
         flash.drop_mask_short flash.drop_mask_size flash.drop_mask_unscaled flash.format flash.head_dim_88 \
         flash.head_groups flash.head_num flash.hidden_size flash.inner_precise_known flash.input_layout \
         flash.keep_prob flash.keep_prob_unused flash.key_batch flash.key_dim flash.key_narrow flash.key_rank \
         flash.kv_rank flash.lengths_count flash.lengths_descend flash.lengths_required flash.lengths_sum \
         flash.mode_without_mask flash.out_shape flash.packed_band flash.packed_rows flash.packed_window \
         flash.padding_mask_ignored flash.prefix_ignored flash.prefix_mask_batch flash.pse_finite flash.pse_hidden_row flash.pse_last_rows \
         flash.pse_packed_last_rows flash.pse_packed_shape flash.pse_required flash.pse_shape flash.pse_slopes_cut \
         flash.pse_slopes_shape flash.pse_slopes_square flash.pse_type flash.query_heads flash.query_rank \
         flash.required flash.rope_aligned flash.rope_alone flash.rope_dim flash.rope_mask flash.rope_mode \
         flash.rope_paired flash.rope_rows flash.scale_finite flash.scale_inverse flash.scale_zero flash.sink_shape \
         flash.softmax_out_ignored flash.softmax_out_layout_known flash.softmax_shape flash.sparse_mode \
         flash.start_index_lone flash.tokens_ignored flash.tokens_negative flash.tokens_without_mask \
         flash.value_dim fp8.quant_scale1 fp8.scales format.plain gather.block gather.cache_shape gather.contiguous gather.format gather.rank \
         gather.required gather.seq_lens gather.seq_offset gather.tokens gather.unit head_dim.aligned \
         head_dim.aligned_rows head_dim.different head_dim.equal head_dim.key head_dim.reordered head_dim.unaligned \
         head_dim.value incre.required indexer.batch indexer.block_size indexer.block_table indexer.contents indexer.format \
         indexer.head_dim indexer.indices indexer.lengths indexer.query indexer.rank indexer.required indexer.values \
         indexer.rows_left_out indexer.rows_without_keys indexer.values_room indexer.values_shape indexer.weights key.batch \
         key.list_batch key.list_batch_empty key.list_batch_unchecked \
         key.list_count key.list_ignored key.list_layout key.list_length key.list_shape key.list_short key.list_sizes \
         key.list_single_length key.rank learnable_sink.head_dim learnable_sink.layout learnable_sink.shape \
         mla.cache mla.full_quant_scales mla.heads mla.lengths mla.other_heads mla.paged mla.tree_mask mxfp8.quant_scale1 \
         mxfp8.scales packed.causal_rows packed.head_dim packed.lengths_required packed.value_rows \
         padding_size.alone padding_size.decode padding_size.lengths padding_size.range padding_size.shape \
         padding_size.unchecked padding_size.unified_alone prompt.card_mask prompt.countable prompt.format \
         prompt.head_dim prompt.input_layout prompt.num_heads prompt.out_shape prompt.required pse_shift.finite \
         pse_shift.hidden_row pse_shift.one_row pse_shift.one_row_taken \
         pse_shift.prefix_unchecked pse_shift.shape pse_shift.slopes pse_type.ignored pse_type.known \
         pse_type.square pse_type.zero quant.int8_query quant.output_unified quant.per_tensor_scales \
         quant_offset2.like_scale quant_scale2.channel quant_scale2.grid quant_scale2.required \
         quant_scale2.shape_unchecked quant_scale2.size query.empty_output query.rank ring.format ring.head_dim \
         ring.lengths ring.lengths_dtype ring.out ring.required ring.softmax_copies ring.softmax_layout \
         rope.absorbed_dims rope.cache_unchecked rope.key_shape rope.layout rope.pair rope.prefill_dims rope.shape \
         scale_value.finite scale_value.inverse scale_value.zero scatter.format scatter.key_shape scatter.required \
         scatter.value_shape shape.countable shared_prefix.alone shared_prefix.length shared_prefix.pair \
         shared_prefix.shape shared_prefix.unified_alone slot_mapping.range slot_mapping.shape slot_mapping.unique \
         softmax_lse.unchecked sparse_mode.known sparse_mode.unified sparse_mode.without_mask \
         split_fuse.causal_rows split_fuse.one_key sparse_flash.batch sparse_flash.block_size \
         sparse_flash.block_table sparse_flash.contents sparse_flash.format sparse_flash.head_dim sparse_flash.indices \
         sparse_flash.key_rows sparse_flash.lengths sparse_flash.no_softmax sparse_flash.out sparse_flash.paged_dim \
         sparse_flash.query_rope sparse_flash.rank sparse_flash.required sparse_flash.rope sparse_flash.rows_left_out \
         sparse_flash.rows_without_keys sparse_flash.scale_finite sparse_flash.scale_inverse sparse_flash.scale_zero sparse_flash.softmax \
         sparse_flash.softmax_room sparse_flash.softmax_shape sparse_flash.value start_idx.range tensor.countable tensor.format tensor.strided \
         tree_mask.ignored tree_mask.more_rows tree_mask.rank tree_mask.rows tree_mask.shape tree_mask.size rms_norm.format \
         rms_norm.gamma_shape rms_norm.rank rms_norm.required rms_norm.rstd_rows rms_norm.rstd_shape \
         rms_norm.y_shape update.format update.head_dim update.infinite_lse update.local_out_shape update.lse_out \
         update.lse_shape update.required value.rank_of_key value.rows_of_key value.shape_of_key \
         value.shape_unchecked value_cache.shape \
         quant_sparse_flash.batch quant_sparse_flash.block_size quant_sparse_flash.block_table \
         quant_sparse_flash.contents quant_sparse_flash.entries quant_sparse_flash.format \
         quant_sparse_flash.head_dim quant_sparse_flash.indices quant_sparse_flash.lengths quant_sparse_flash.out \
         quant_sparse_flash.quantisation quant_sparse_flash.rank quant_sparse_flash.required \
         quant_sparse_flash.rows_left_out quant_sparse_flash.rows_without_keys quant_sparse_flash.scale_finite \
         quant_sparse_flash.scale_inverse quant_sparse_flash.scale_zero quant_sparse_flash.value \
         quant_indexer.batch quant_indexer.block_size quant_indexer.block_table quant_indexer.contents \
         quant_indexer.contiguous \
         quant_indexer.format quant_indexer.head_dim quant_indexer.indices quant_indexer.key_scale \
         quant_indexer.lengths quant_indexer.query quant_indexer.rank quant_indexer.required \
         quant_indexer.rows_left_out quant_indexer.rows_without_keys quant_indexer.unchecked_null \
         quant_indexer.weights \
         fused_conv.blocks fused_conv.channels fused_conv.computed fused_conv.contents fused_conv.format \
         fused_conv.left_out fused_conv.line_rows fused_conv.lines fused_conv.rank fused_conv.required fused_conv.shape \
         fused_conv.shared_line fused_conv.starts fused_conv.strides fused_conv.unchecked_null \
         causal_conv.channels causal_conv.contents causal_conv.contiguous causal_conv.format causal_conv.left_out \
         causal_conv.line_rows causal_conv.lines causal_conv.rank causal_conv.required causal_conv.shape \
         causal_conv.shared_line causal_conv.starts \
         recurrent_delta.contents recurrent_delta.dense_state recurrent_delta.format recurrent_delta.lost_out \
         recurrent_delta.per_token recurrent_delta.pool recurrent_delta.rank recurrent_delta.required \
         recurrent_delta.room recurrent_delta.shape recurrent_delta.scale_finite recurrent_delta.scale_inverse recurrent_delta.scale_zero \
         recurrent_delta.shared_slot chunk_delta.scale_finite chunk_delta.scale_inverse chunk_delta.scale_zero chunk_delta.contents chunk_delta.rows_left_out chunk_delta.no_tokens \
         chunk_delta.format chunk_delta.rank chunk_delta.required chunk_delta.shape nsa_compress.required \
         nsa_compress_with_cache.required nsa_compress.format nsa_compress_with_cache.format nsa_compress.input \
         nsa_compress_with_cache.input nsa_compress.weight nsa_compress_with_cache.weight nsa_compress.head_dim \
         nsa_compress_with_cache.head_dim nsa_compress.lengths nsa_compress_with_cache.lengths nsa_compress.out \
         nsa_compress.out_rows nsa_compress_with_cache.batch nsa_compress_with_cache.contents \
         nsa_compress_with_cache.output_cache nsa_compress_attention.required nsa_selected_attention.required \
         nsa_compress_attention.format nsa_selected_attention.format nsa_compress_attention.rank \
         nsa_selected_attention.rank nsa_compress_attention.rows nsa_selected_attention.rows \
         nsa_compress_attention.heads nsa_selected_attention.heads nsa_compress_attention.pages \
         nsa_selected_attention.pages nsa_compress_attention.selected nsa_selected_attention.selected \
         nsa_compress_attention.out nsa_selected_attention.out nsa_compress_attention.table_room \
         nsa_selected_attention.table_room nsa_compress_attention.rows_left_out nsa_selected_attention.rows_left_out \
         nsa_compress_attention.scale_finite nsa_selected_attention.scale_finite nsa_compress_attention.scale_zero \
         nsa_selected_attention.scale_zero nsa_compress_attention.scale_inverse nsa_selected_attention.scale_inverse \
         nsa_compress_attention.contents nsa_selected_attention.contents nsa_selected_attention.head_dim \
         nsa_selected_attention.rows_without_tokens nsa_compress_attention.original",
    ),
    (
        "several values would do, and the call does not say which was meant",
        "causal_conv.mode fused_conv.block_size fused_conv.max_query_len fused_conv.mode fused_conv.pad_slot \
         fused_conv.unread_mode \
         actual_seq_lengths.range actual_seq_lengths_kv.range antiquant.mixed_modes antiquant.nz_sparse_mode \
         antiquant.packed antiquant_mode.ignored block_table.row_short packed.kv_range split_fuse.ends \
         cache_mode.known flash.next_tokens flash.pre_tokens flash.prefix fp8.cache gather.cache_mode incre.decode_rules \
         incre.input_layout incre.registered indexer.count indexer.layout indexer.sparse_mode \
         indexer.tokens inner_precise.int8_cache inner_precise.known inner_precise.meaning \
         inner_precise.range inner_precise.unchecked input_layout.form input_layout.heads_first \
         input_layout.prefill input_layout.quantised mla.block_size mla.full_quant mla.full_quant_950 \
         mla.inner_precise mla.kv_heads mla.rows mla.sliding mla.softmax_lse mla.sparse_mode mxfp8.cache \
         next_tokens.reach num_heads.zero packed.band packed.band_head_dim packed.sparse_mode portable.refused \
         pre_tokens.reach prompt.prefill_rules pse_shift.layout quant.int4_output quant.int8_query_decode \
         quant.left_over_mode quant.output_band quant.output_band_tokens quant.output_layout quant.output_rope \
         quant.per_block quant.per_tensor_kernel query.hidden_size query.rows_max ring.input_layout ring.shapes \
         rms_norm.epsilon rms_norm.finite_epsilon scatter_mode.known softmax_lse.ignored sparse_mode.form \
         sparse_mode.full_quant split_fuse.heads_divide split_fuse.kv_rows \
         split_fuse.mask split_fuse.q_rows sparse_flash.attention_mode sparse_flash.layout \
         sparse_flash.sparse_block_size sparse_flash.sparse_mode sparse_flash.tokens block_sparse.block_keys \
         block_sparse.inner_precise block_sparse.layout block_sparse.mask_type block_sparse.precision \
         block_sparse.softmax_lse_flag block_sparse.tokens tokens.both_negative tokens.empty_band \
         tree_mask.form update.empty_row \
         quant_sparse_flash.attention_mode quant_sparse_flash.layout quant_sparse_flash.sparse_block_size \
         quant_sparse_flash.sparse_mode quant_sparse_flash.tokens \
         quant_indexer.count quant_indexer.layout quant_indexer.quant_modes quant_indexer.sparse_mode \
         quant_indexer.tokens \
         nsa_compress.block nsa_compress_with_cache.block nsa_compress.stride nsa_compress_with_cache.stride \
         nsa_compress_attention.block nsa_compress_attention.stride nsa_compress_attention.whole_strides \
         nsa_compress_attention.forced nsa_compress_attention.layout nsa_selected_attention.layout \
         nsa_compress_attention.select_block_size nsa_selected_attention.select_block_size",
    ),
];
