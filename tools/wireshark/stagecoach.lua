-- What stock Wireshark does not know of RPC-over-RDMA: version 2, CM private data, the Connection Configuration Protocol.
--
--   rpcrdma2       version 2, draft-cel-nfsv4-rpcrdma-version-two-09 ("v2"), over iWARP and RoCE
--   rpcrdma_cm     CM private data, RFC 8797 ("pvtdata"), in MPA Requests and Replies and in InfiniBand's CM messages
--   rpcrdma_ccp    the Connection Configuration Protocol, RFC 5666 section 6, over versions 1 and 2
--
-- For Wireshark 4.0 and later. docs/wireshark.md says how to install it; docs/decisions/0047 how it gets at the messages
-- and what it leaves out. Every read is checked against the bytes there are: what is malformed is said by expert
-- information, and no input raises a Lua error.

local CCP_PROGRAM = 100417
local PRIVATE_DATA_MAGIC = 0xf6ab0e18
local F_RESPONSE = 1
local HTYPE = { MSG = 0, NOMSG = 1, ERROR = 4, CONNPROP = 5 }

------------------------------------------------------------------------------------------------------------------------
-- Protocols and their fields

local v2 = Proto("rpcrdma2", "RPC-over-RDMA version 2")
local cm = Proto("rpcrdma_cm", "RPC-over-RDMA CM private data")
local ccp = Proto("rpcrdma_ccp", "RPC-over-RDMA Connection Configuration Protocol")
-- What is not handed to anybody by Wireshark is looked for behind its dissectors.
local rest = Proto("rpcrdma_rest", "RPC-over-RDMA, what no table leads to")

local htype_names = { [0] = "RDMA2_MSG", [1] = "RDMA2_NOMSG", [4] = "RDMA2_ERROR", [5] = "RDMA2_CONNPROP" }
local error_names = {
  [1] = "RDMA2_ERR_VERS", [2] = "RDMA2_ERR_BAD_XDR", [3] = "RDMA2_ERR_INVAL_HTYPE", [4] = "RDMA2_ERR_READ_CHUNKS",
  [5] = "RDMA2_ERR_WRITE_CHUNKS", [6] = "RDMA2_ERR_SEGMENTS", [7] = "RDMA2_ERR_WRITE_RESOURCE",
  [8] = "RDMA2_ERR_REPLY_RESOURCE", [9] = "RDMA2_ERR_SYSTEM",
}
local property_names = { [1] = "Receive Buffer Size", [2] = "Reverse Request Support" }
local reverse_names = { [0] = "RDMA2_RVREQSUP_NONE", [1] = "RDMA2_RVREQSUP_INLINE", [2] = "RDMA2_RVREQSUP_GENL" }

local function u32(proto, name, title, display, names)
  return ProtoField.uint32(proto .. "." .. name, title, display, names)
end

local f = {
  xid = u32("rpcrdma2", "xid", "XID", base.HEX),
  vers = u32("rpcrdma2", "vers", "Version", base.DEC),
  credit = u32("rpcrdma2", "credit", "Credits", base.DEC),
  htype = u32("rpcrdma2", "htype", "Header type", base.DEC, htype_names),
  flags = u32("rpcrdma2", "flags", "Flags", base.HEX),
  response = ProtoField.bool("rpcrdma2.flags.response", "RESPONSE", 32, nil, 0x00000001),
  reserved = u32("rpcrdma2", "flags.reserved", "Reserved flags", base.HEX),
  inv_handle = u32("rpcrdma2", "inv_handle", "Handle to invalidate", base.HEX),
  reads = u32("rpcrdma2", "reads", "Read list", base.DEC),
  writes = u32("rpcrdma2", "writes", "Write list", base.DEC),
  reply = u32("rpcrdma2", "reply", "Reply chunk", base.DEC),
  segments = u32("rpcrdma2", "segments", "Segments", base.DEC),
  position = u32("rpcrdma2", "position", "Position", base.DEC),
  handle = u32("rpcrdma2", "handle", "Handle", base.HEX),
  length = u32("rpcrdma2", "length", "Length", base.DEC),
  offset = ProtoField.uint64("rpcrdma2.offset", "Offset", base.HEX),
  err = u32("rpcrdma2", "err", "Error", base.DEC, error_names),
  vers_low = u32("rpcrdma2", "vers_low", "Lowest version", base.DEC),
  vers_high = u32("rpcrdma2", "vers_high", "Highest version", base.DEC),
  max_chunks = u32("rpcrdma2", "max_chunks", "Most chunks", base.DEC),
  max_segments = u32("rpcrdma2", "max_segments", "Most segments", base.DEC),
  chunk_index = u32("rpcrdma2", "chunk_index", "Index of the Write chunk", base.DEC),
  length_needed = u32("rpcrdma2", "length_needed", "Bytes needed", base.DEC),
  props = u32("rpcrdma2", "props", "Properties", base.DEC),
  which = u32("rpcrdma2", "which", "Property", base.DEC, property_names),
  data_length = u32("rpcrdma2", "data_length", "Length of the value", base.DEC),
  data = ProtoField.bytes("rpcrdma2.data", "Value"),
  rbsiz = u32("rpcrdma2", "rbsiz", "Receive Buffer Size", base.DEC),
  brs = u32("rpcrdma2", "brs", "Reverse Request Support", base.DEC, reverse_names),
  fragment = ProtoField.bytes("rpcrdma2.fragment", "Part of a message"),
  length_total = u32("rpcrdma2", "reassembled.length", "Reassembled length", base.DEC),
}
v2.fields = f

local c = {
  magic = u32("rpcrdma_cm", "magic", "Format Identifier", base.HEX),
  version = ProtoField.uint8("rpcrdma_cm.version", "Version", base.DEC),
  flags = ProtoField.uint8("rpcrdma_cm.flags", "Flags", base.HEX),
  invalidate = ProtoField.bool("rpcrdma_cm.flags.r", "Remote invalidation", 8, nil, 0x01),
  send_size = u32("rpcrdma_cm", "send_size", "Send Size (bytes)", base.DEC),
  receive_size = u32("rpcrdma_cm", "receive_size", "Receive Size (bytes)", base.DEC),
}
cm.fields = c

local p = {
  xid = u32("rpcrdma_ccp", "xid", "XID", base.HEX),
  reply = ProtoField.bool("rpcrdma_ccp.reply", "Reply"),
  procedure = u32("rpcrdma_ccp", "procedure", "Procedure", base.DEC, { [0] = "NULL", [1] = "CONF_RDMA" }),
  maxcall = u32("rpcrdma_ccp", "maxcall_sendsize", "Largest inline call (bytes)", base.DEC),
  maxreply = u32("rpcrdma_ccp", "maxreply_sendsize", "Largest inline reply (bytes)", base.DEC),
  align = u32("rpcrdma_ccp", "align", "Alignment (bytes)", base.DEC),
  maxread = u32("rpcrdma_ccp", "maxrdmaread", "RDMA Reads at once", base.DEC),
  status = u32("rpcrdma_ccp", "accept_stat", "Accept status", base.DEC, {
    [0] = "SUCCESS", [1] = "PROG_UNAVAIL", [2] = "PROG_MISMATCH", [3] = "PROC_UNAVAIL", [4] = "GARBAGE_ARGS",
    [5] = "SYSTEM_ERR",
  }),
}
ccp.fields = p

local e_cut = ProtoExpert.new("rpcrdma2.cut", "The message ends inside of an item", expert.group.MALFORMED, expert.severity.ERROR)
local e_illegal = ProtoExpert.new("rpcrdma2.illegal", "Illegal", expert.group.PROTOCOL, expert.severity.ERROR)
local e_error = ProtoExpert.new("rpcrdma2.reported", "Transport error reported", expert.group.RESPONSE_CODE, expert.severity.NOTE)
v2.experts = { e_cut, e_illegal, e_error }
local e_cm = ProtoExpert.new("rpcrdma_cm.illegal", "Illegal", expert.group.PROTOCOL, expert.severity.ERROR)
cm.experts = { e_cm }
local e_ccp = ProtoExpert.new("rpcrdma_ccp.cut", "The message ends inside of an item", expert.group.MALFORMED, expert.severity.ERROR)
ccp.experts = { e_ccp }

-- Of dissectors before ours.
local get = {
  opcode = Field.new("infiniband.bth.opcode"),
  psn = Field.new("infiniband.bth.psn"),
  qp = Field.new("infiniband.bth.destqp"),
  stream = Field.new("tcp.stream"),
  mpa_private = Field.new("iwarp_mpa.privatedata"),
  rpcordma_xid = Field.new("rpcordma.xid"),
  own_xid = Field.new("rpcrdma2.xid"),
  message_offset = Field.new("iwarp_ddp.mo"),
  reassembled = Field.new("iwarp_rdma.send.reassembled.data"),
}

------------------------------------------------------------------------------------------------------------------------
-- Reading, within bounds

-- A cursor over a Tvb. With a tree it shows what it reads; once the bytes have ended it reads zeros and shows nothing.
local Reader = {}
Reader.__index = Reader

local function new_reader(tvb, at, expert_of_cut)
  return setmetatable({ tvb = tvb, at = at or 0, ok = true, cut = expert_of_cut }, Reader)
end

function Reader:left() return self.tvb:len() - self.at end

-- The range of the next `size` bytes; nil when there are fewer, which the tree is told once.
function Reader:take(size, tree)
  if not self.ok then return nil end
  if size > self:left() then
    self.ok = false
    if tree then tree:add_proto_expert_info(self.cut, "The message ends here") end
    return nil
  end
  local range = self.tvb(self.at, size)
  self.at = self.at + size
  return range
end

-- The next word, and its item when there is a tree.
function Reader:u32(tree, field)
  local range = self:take(4, tree)
  if not range then return 0 end
  local item = nil
  if tree then item = tree:add(field, range) end
  return range:uint(), item
end

function Reader:skip(size, tree)
  if size > 0 then self:take(size, tree) end
end

local function padded(size) return size + (-size) % 4 end

local function illegal(item, text)
  if item then item:add_proto_expert_info(e_illegal, text) end
end

------------------------------------------------------------------------------------------------------------------------
-- Chunk lists. Without a tree: whether they are well-formed.

-- Its handle and length.
local function read_segment(r, tree)
  local handle = r:u32(tree, f.handle)
  local length = r:u32(tree, f.length)
  local range = r:take(8, tree)
  if tree and range then
    local item = tree:add(f.offset, range)
    if length > 0 and range:uint64() > UInt64.max() - UInt64(length - 1) then
      illegal(item, "the segment passes the end of the address space (v2 6.3)")
    end
  end
  return handle, length
end

-- The word before an item of optional-data.
local function read_present(r, tree, field, what)
  local word, item = r:u32(tree, field)
  if not r.ok then return false end
  if word > 1 then
    r.bad = true
    illegal(item, "neither 0 nor 1 (v2 3.3)")
  end
  if item then item:append_text(word == 0 and " (end)" or " (" .. what .. ")") end
  return word ~= 0
end

-- Returns how many bytes there are in it.
local function read_chunk(r, tree, handles)
  local total = 0
  local count, item = r:u32(tree, f.segments)
  if not r.ok then return total end
  if count * 16 > r:left() then
    r.bad = true
    illegal(item, "there is no room for as many (v2 6.3)")
  end
  for i = 1, count do
    if not r.ok then return total end
    local sub = tree and tree:add(v2, r.tvb(r.at, math.min(16, r:left())), "Segment " .. (i - 1))
    local handle, length = read_segment(r, sub)
    handles[handle] = true
    total = total + length
  end
  return total
end

local function read_lists(r, tree)
  local handles = {}
  local lists = {
    reads = 0, writes = 0, reply = false, position_zero = false, handles = handles,
    entries = {}, written = 0, replied = 0, zero_length = 0,
  }
  while read_present(r, tree, f.reads, "Read segment " .. lists.reads) do
    local sub = tree and tree:add(v2, r.tvb(r.at, math.min(20, r:left())), "Read segment " .. lists.reads)
    local position, item = r:u32(sub, f.position)
    if position % 4 ~= 0 then illegal(item, "not a multiple of four (v2 10.1)") end
    if position == 0 then lists.position_zero = true end
    local handle, length = read_segment(r, sub)
    handles[handle] = true
    if position == 0 then
      lists.zero_length = lists.zero_length + length
    else
      lists.entries[#lists.entries + 1] = { position = position, length = length, item = item, number = #lists.entries }
    end
    lists.reads = lists.reads + 1
  end
  while r.ok and read_present(r, tree, f.writes, "Write chunk " .. lists.writes) do
    local sub = tree and tree:add(v2, r.tvb(r.at, math.min(4, r:left())), "Write chunk " .. lists.writes)
    -- With room for its round-up.
    lists.written = lists.written + read_chunk(r, sub, handles) + 3
    lists.writes = lists.writes + 1
  end
  if r.ok and read_present(r, tree, f.reply, "Reply chunk") then
    lists.reply = true
    local sub = tree and tree:add(v2, r.tvb(r.at, math.min(4, r:left())), "Reply chunk")
    lists.replied = read_chunk(r, sub, handles)
  end
  return lists
end

-- Whether chunks begin in the message, and behind each other. `size`: of the message without them.
local function judge_positions(lists, size)
  table.sort(lists.entries, function(a, b)
    if a.position ~= b.position then return a.position < b.position end
    return a.number < b.number
  end)
  local chunks = {}
  for _, entry in ipairs(lists.entries) do
    local last = chunks[#chunks]
    if last and last.position == entry.position then
      last.length = last.length + entry.length
    else
      chunks[#chunks + 1] = { position = entry.position, length = entry.length, item = entry.item }
    end
  end
  local chunk_end, removed = 0, 0
  for _, chunk in ipairs(chunks) do
    if chunk.position % 4 == 0 and chunk.position < chunk_end then
      illegal(chunk.item, "begins inside of the chunk before it (v2 6.3)")
    elseif chunk.position % 4 == 0 and chunk.position > size + removed then
      illegal(chunk.item, "behind the end of the message (v2 6.3)")
    end
    removed = removed + padded(chunk.length)
    chunk_end = chunk.position + padded(chunk.length)
  end
end

------------------------------------------------------------------------------------------------------------------------
-- Connection Configuration Protocol. Replies do not name the program: they are those of the calls whose XID they have on
-- the same connection, which are remembered on the first pass.

local ccp_calls = {}
local ccp_replies = {}

-- The call of `xid` from one end to the other. Of RoCE, the hosts have to do: each direction has a queue pair of its own.
local function call_key(xid, from, to)
  local stream = get.stream()
  return string.format("%08x %s %s %s", xid, stream and stream.value or "roce", tostring(from), tostring(to))
end

local function note_call(xid, pinfo, is_ccp)
  if not pinfo.visited then
    ccp_calls[call_key(xid, pinfo.src, pinfo.dst)] = is_ccp or nil
  end
end

-- A call is answered once.
local function answers_ccp(xid, pinfo)
  local reply = string.format("%08x %d", xid, pinfo.number)
  if not pinfo.visited then
    local key = call_key(xid, pinfo.dst, pinfo.src)
    ccp_replies[reply] = ccp_replies[reply] or ccp_calls[key]
    ccp_calls[key] = nil
  end
  return ccp_replies[reply]
end

local function skip_auth(r)
  r:skip(4)
  local length = r:u32()
  if r.ok and length > 400 then r.ok = false end
  r:skip(padded(length))
end

-- The RPC message at `at`; true when it is one of this protocol. Nothing is shown without a tree.
local function dissect_ccp(tvb, at, pinfo, tree)
  local r = new_reader(tvb, at, e_ccp)
  local xid, direction = r:u32(), r:u32()
  if not r.ok or direction > 1 then return false end
  local procedure = 1
  if direction == 0 then
    r:skip(4)
    local program = r:u32()
    r:skip(4)
    procedure = r:u32()
    if not r.ok then return false end
    note_call(xid, pinfo, program == CCP_PROGRAM and procedure == 1)
    if program ~= CCP_PROGRAM then return false end
    skip_auth(r)
    skip_auth(r)
  else
    if not answers_ccp(xid, pinfo) then return false end
    -- Denied replies have no status of this kind.
    if r:u32() ~= 0 then return false end
    skip_auth(r)
  end
  local sub = tree:add(ccp, tvb(at))
  sub:add(p.xid, tvb(at, 4))
  sub:add(p.reply, tvb(at + 4, 4), direction == 1)
  if direction == 0 then sub:add(p.procedure, tvb(at + 20, 4)) end
  if not r.ok then
    sub:add_proto_expert_info(e_ccp, "The message ends here")
    return true
  end
  if direction == 1 and r:u32(sub, p.status) ~= 0 then return true end
  if procedure ~= 1 then return true end
  r:u32(sub, p.maxcall)
  r:u32(sub, direction == 0 and p.maxreply or p.align)
  local _, item = r:u32(sub, p.maxread)
  if item then pinfo.cols.info:append(direction == 0 and " [CONF_RDMA call]" or " [CONF_RDMA reply]") end
  return true
end

------------------------------------------------------------------------------------------------------------------------
-- Version 2

-- A server of version 1 that echoes the version it refuses, as Linux does, answers in its own layout, without flags.
local function is_echoed_version(tvb)
  return tvb:len() == 28 and tvb(4, 4):uint() == 2 and tvb(12, 4):uint() == HTYPE.ERROR and tvb(16, 4):uint() == 1 and
         tvb(20, 4):uint() == 1 and tvb(24, 4):uint() >= 1
end

local function read_properties(r, tree)
  local count, item = r:u32(tree, f.props)
  if not r.ok then return end
  if count * 8 > r:left() then
    r.bad = true
    illegal(item, "there is no room for as many (v2 5.3.4)")
  end
  local seen = {}
  for _ = 1, count do
    if not r.ok then return end
    local sub = tree and tree:add(v2, r.tvb(r.at, math.min(8, r:left())), "Property")
    local which, which_item = r:u32(sub, f.which)
    if r.ok and seen[which] and which <= 2 then
      r.bad = true
      illegal(which_item, "the same property twice (v2 4.1)")
    end
    seen[which] = true
    local length, length_item = r:u32(sub, f.data_length)
    if not r.ok then return end
    local field = ({ f.rbsiz, f.brs })[which]
    if length > 0 and field and length ~= 4 then
      r.bad = true
      illegal(length_item, "the property's type has 4 bytes (v2 4.1)")
    end
    if length == 4 and field then
      local value, value_item = r:u32(sub, field)
      if r.ok and which == 1 and value < 1024 then
        r.bad = true
        illegal(value_item, "less than the 1024 bytes that every end takes (v2 7)")
      elseif r.ok and which == 2 and value > 2 then
        r.bad = true
        illegal(value_item, "no level of support (v2 4.2.2)")
      end
    elseif length > 0 then
      local range = r:take(length, sub)
      if range and sub then sub:add(f.data, range) end
      r:skip(padded(length) - length, sub)
    end
  end
end

local function read_error(r, tree)
  local code, item = r:u32(tree, f.err)
  if not r.ok then return end
  if item then item:add_proto_expert_info(e_error, error_names[code] or "an error of an extension") end
  if code == 1 then
    local low = r:u32(tree, f.vers_low)
    local high, high_item = r:u32(tree, f.vers_high)
    if r.ok and low > high then illegal(high_item, "the range has no version in it (v2 5.3.3)") end
  elseif code == 4 or code == 5 then
    r:u32(tree, f.max_chunks)
  elseif code == 6 then
    r:u32(tree, f.max_segments)
  elseif code == 7 then
    r:u32(tree, f.chunk_index)
    r:u32(tree, f.length_needed)
  elseif code == 8 then
    r:u32(tree, f.length_needed)
  end
end

-- Whether a message that nothing else speaks for is one of version 2: all of its header is as it should be, and so is
-- the beginning of what follows it. Other protocols have a 2 in the second word, too.
local function is_version2(tvb)
  if tvb:len() < 20 or tvb(4, 4):uint() ~= 2 then return false end
  if is_echoed_version(tvb) then return true end
  local htype, flags = tvb(12, 4):uint(), tvb(16, 4):uint()
  if flags > F_RESPONSE then return false end
  local r = new_reader(tvb, 20)
  if htype == HTYPE.MSG or htype == HTYPE.NOMSG then
    r:skip(4)
    local lists = read_lists(r, nil)
    if not r.ok or r.bad then return false end
    if htype == HTYPE.NOMSG then return r:left() == 0 and (lists.position_zero or lists.reply) end
    return r:left() >= 8 and tvb(r.at, 4):uint() == tvb(0, 4):uint() and tvb(r.at + 4, 4):uint() == flags
  elseif htype == HTYPE.ERROR then
    read_error(r, nil)
  elseif htype == HTYPE.CONNPROP then
    read_properties(r, nil)
  else
    return false
  end
  return r.ok and not r.bad and r:left() == 0
end

-- Where the document says what a header of each type is.
local sections = {
  [HTYPE.MSG] = "5.3.1", [HTYPE.NOMSG] = "5.3.2", [HTYPE.ERROR] = "5.3.3", [HTYPE.CONNPROP] = "5.3.4",
}

local function dissect_version2(tvb, pinfo, tree)
  pinfo.cols.protocol = "RPCoRDMA2"
  local sub = tree:add(v2, tvb())
  local r = new_reader(tvb, 0, e_cut)
  local xid = r:u32(sub, f.xid)
  r:u32(sub, f.vers)
  local credits, credit_item = r:u32(sub, f.credit)
  local htype, htype_item = r:u32(sub, f.htype)
  if not r.ok then return end
  local name = htype_names[htype] or ("header type " .. htype)
  pinfo.cols.info = string.format("%s XID 0x%08x", name, xid)
  sub:append_text(", " .. name)
  if is_echoed_version(tvb) then
    sub:append_text(" (in the layout of version 1)")
    read_error(r, sub)
    return
  end

  local flags, flags_item = r:u32(sub, f.flags)
  if not r.ok then return end
  flags_item:add(f.response, tvb(16, 4))
  if flags > F_RESPONSE then
    flags_item:add(f.reserved, tvb(16, 4), flags - flags % 2)
    illegal(flags_item, "reserved flags are set (v2 3.2)")
  end
  local response = flags % 2 == F_RESPONSE
  local lists

  if htype == HTYPE.ERROR then
    if not response then illegal(flags_item, "an error is a response: the flag is to be set (v2 3.2)") end
    read_error(r, sub)
  elseif htype == HTYPE.CONNPROP then
    read_properties(r, sub)
  elseif htype == HTYPE.MSG or htype == HTYPE.NOMSG then
    local handle, handle_item = r:u32(sub, f.inv_handle)
    lists = read_lists(r, sub)
    if not r.ok or r.bad then return end
    if handle ~= 0 and not response and not lists.handles[handle] then
      illegal(handle_item, "none of the handles in this header (v2 3.3)")
    end
    if response and lists.reads > 0 then illegal(htype_item, "a reply with a Read list (v2 3.3)") end
    if response and lists.replied > 0 and (htype == HTYPE.MSG or lists.position_zero) then
      illegal(htype_item, "a message beside a filled Reply chunk (v2 10.1)")
    end
    if htype == HTYPE.NOMSG and response and credits == 0 then illegal(credit_item, "a grant is never zero (v2 10.1)") end
    if htype == HTYPE.NOMSG and not response and not lists.position_zero then
      illegal(htype_item, "a long call without a Position-Zero Read chunk (v2 5.3.2)")
    elseif htype == HTYPE.NOMSG and response and not lists.reply then
      illegal(htype_item, "a long reply without the Reply chunk (v2 5.3.2)")
    elseif htype == HTYPE.MSG and lists.position_zero then
      illegal(htype_item, "a Position-Zero Read chunk beside an inline message (v2 5.3.1)")
    end
  else
    illegal(htype_item, "no header type of version 2 (v2 5.2)")
    return
  end
  if not r.ok then return end

  if lists then
    local size = htype == HTYPE.MSG and r:left() or lists.zero_length
    if response then size = size + lists.written end
    if response and htype == HTYPE.NOMSG and not lists.position_zero then size = size + lists.replied end
    judge_positions(lists, size)
  end
  if htype ~= HTYPE.MSG then
    if r:left() > 0 then
      illegal(htype_item, "nothing is to follow this header (v2 " .. sections[htype] .. ")")
    end
    return
  end
  if r:left() == 0 then
    illegal(htype_item, "the RPC message that is to follow is not there (v2 5.3.1)")
    return
  end
  if r:left() < 4 then
    sub:add_proto_expert_info(e_cut, "The message ends here")
    return
  end
  if tvb(r.at, 4):uint() ~= xid then illegal(htype_item, "the RPC message has another XID (v2 10.1)") end
  local direction = r:left() >= 8 and tvb(r.at + 4, 4):uint()
  if (direction == 0 or direction == 1) and direction ~= flags % 2 then
    illegal(flags_item, "RESPONSE is not what the RPC message says (v2 3.2)")
  end
  if direction == 1 and credits == 0 then illegal(credit_item, "a grant is never zero (v2 10.1)") end
  if not dissect_ccp(tvb, r.at, pinfo, tree) then
    Dissector.get("rpc"):call(tvb(r.at):tvb(), pinfo, tree)
  end
end

------------------------------------------------------------------------------------------------------------------------
-- How messages come here

-- Connections on which a message was one of version 2 beyond doubt: there, one that is malformed is ours as well.
local known = {}
-- RoCE: what is there of the message at hand, by queue pair; and what packets were found to be on the first pass.
local partial = {}
local found = {}

function v2.init()
  known, partial, found, ccp_calls, ccp_replies = {}, {}, {}, {}, {}
end

local function claims(key, tvb)
  if tvb:len() >= 8 and tvb(4, 4):uint() == 2 and (known[key] or is_version2(tvb)) then
    known[key] = true
    return true
  end
  return false
end

-- Wireshark hands over whole Sends.
local function iwarp(tvb, pinfo, tree)
  local stream = get.stream()
  if not stream or not claims("tcp " .. tostring(stream.value), tvb) then return false end
  dissect_version2(tvb, pinfo, tree)
  return true
end

-- RC, by opcode: how a packet stands in its Send.
local FIRST, MIDDLE, LAST, ONLY = 1, 2, 3, 4
local sends = {
  [0x00] = FIRST, [0x01] = MIDDLE, [0x02] = LAST, [0x03] = LAST, [0x04] = ONLY, [0x05] = ONLY, [0x16] = LAST, [0x17] = ONLY,
}

-- A message that is not whole is not more than this.
local MESSAGE_MAX = 1024 * 1024

-- Whether the first packet of a message can be one of version 2: there may be less than all of its header.
local function may_begin(key, tvb)
  if tvb:len() < 20 or tvb(4, 4):uint() ~= 2 then return false end
  return known[key] or (htype_names[tvb(12, 4):uint()] ~= nil and tvb(16, 4):uint() <= F_RESPONSE)
end

local function note_part(key, tvb, pinfo, psn)
  local state = partial[key]
  state.psn = psn
  state.size = state.size + tvb:len()
  state.parts[#state.parts + 1] = tvb:bytes()
  if state.size > MESSAGE_MAX then partial[key] = nil end
end

-- First pass over a packet of a Send: what it is, for this pass and the ones that follow.
local function examine(place, key, pair, tvb, pinfo, psn)
  if place == ONLY then
    partial[pair] = nil
    return claims(key, tvb) and { whole = true } or {}
  elseif place == FIRST then
    partial[pair] = nil
    if not may_begin(key, tvb) then return {} end
    partial[pair] = { parts = {}, size = 0 }
    note_part(pair, tvb, pinfo, psn)
    return { part = true }
  end
  local state = partial[pair]
  if not state or psn ~= (state.psn + 1) % 0x1000000 then return {} end
  note_part(pair, tvb, pinfo, psn)
  if place == MIDDLE or not partial[pair] then return { part = true } end
  partial[pair] = nil
  local all = ByteArray.new()
  for _, part in ipairs(state.parts) do all:append(part) end
  if not claims(key, all:tvb("RPC-over-RDMA message")) then return {} end
  return { part = true, message = all }
end

local function roce(tvb, pinfo, tree)
  local opcode, psn, qp = get.opcode(), get.psn(), get.qp()
  local place = opcode and sends[opcode.value]
  if not place or not psn or not qp or tvb:len() == 0 then return false end
  local packet = found[pinfo.number]
  if not packet then
    local from, to = tostring(pinfo.src), tostring(pinfo.dst)
    -- Both directions of a connection, which has one queue pair's number in each: the hosts alone are in both.
    local key = "roce " .. (from < to and from .. " " .. to or to .. " " .. from)
    packet = examine(place, key, from .. " " .. to .. " " .. tostring(qp.value), tvb, pinfo, psn.value)
    found[pinfo.number] = packet
  end
  if packet.whole then
    dissect_version2(tvb, pinfo, tree)
    return true
  end
  if not packet.part then return false end
  pinfo.cols.protocol = "RPCoRDMA2"
  local sub = tree:add(v2, tvb(), "RPC-over-RDMA version 2, part of a message")
  sub:add(f.fragment, tvb())
  if packet.message then
    sub:add(f.length_total, packet.message:len()):set_generated()
    dissect_version2(packet.message:tvb("RPC-over-RDMA message"), pinfo, tree)
  else
    pinfo.cols.info = "part of a message"
  end
  return true
end

v2:register_heuristic("iwarp_ddp_rdmap", iwarp)
v2:register_heuristic("infiniband.payload", roce)

------------------------------------------------------------------------------------------------------------------------
-- CM private data

-- Where in the bytes it begins; nil: nowhere. It may stand behind another layer's data, at any alignment (pvtdata 5.2).
local function find_private_data(tvb)
  for at = 0, tvb:len() - 5 do
    if tvb(at, 4):uint() == PRIVATE_DATA_MAGIC then return at end
  end
  return nil
end

local function dissect_private_data(tvb, at, pinfo, tree)
  local left = tvb:len() - at
  local sub = tree:add(cm, tvb(at, math.min(8, left)))
  sub:add(c.magic, tvb(at, 4))
  sub:add(c.version, tvb(at + 4, 1))
  if tvb(at + 4, 1):uint() ~= 1 then
    sub:append_text(", of a version that is not known")
    return
  end
  if left < 8 then
    sub:add_proto_expert_info(e_cm, "The message ends here")
    return
  end
  local item = sub:add(c.flags, tvb(at + 5, 1))
  item:add(c.invalidate, tvb(at + 5, 1))
  if tvb(at + 5, 1):uint() > 1 then item:add_proto_expert_info(e_cm, "reserved bits are set (pvtdata 4)") end
  local send, receive = (tvb(at + 6, 1):uint() + 1) * 1024, (tvb(at + 7, 1):uint() + 1) * 1024
  sub:add(c.send_size, tvb(at + 6, 1), send)
  sub:add(c.receive_size, tvb(at + 7, 1), receive)
  sub:append_text(string.format(", send %d, receive %d", send, receive))
end

local function cm_private(tvb, pinfo, tree)
  local at = find_private_data(tvb)
  if not at then return false end
  dissect_private_data(tvb, at, pinfo, tree)
  return true
end

cm:register_heuristic("infiniband.mad.cm.private", cm_private)

------------------------------------------------------------------------------------------------------------------------
-- MPA hands its private data to nobody, and the dissector of version 1 hands RPC messages of unknown programs to nobody.

-- Where the RPC message behind a header of version 1 begins; nil when there is none.
local function message_of_version1(tvb, at)
  local r = new_reader(tvb, at + 12)
  local msg_type = r:u32()
  if msg_type == 2 then r:skip(8) elseif msg_type ~= 0 then return nil end
  read_lists(r, nil)
  if not r.ok or r.bad or r:left() < 8 then return nil end
  return r.at
end

-- Once the dissector of version 1 has taken a Send, Wireshark asks it first, and it keeps iWARP's Sends of other versions
-- to itself without a word. What nobody has shown is looked for in the DDP segments.
local function iwarp_again(pinfo, tree)
  if get.rpcordma_xid() or get.own_xid() then return end
  local whole = get.reassembled()
  if whole then
    if whole.len > 0 then iwarp(whole.range:tvb(), pinfo, tree) end
    return
  end
  for _, offset in ipairs({ get.message_offset() }) do
    -- In front of the message offset stand the length of the ULPDU and 14 bytes of its header.
    local source, at = offset.source, offset.offset
    if source and at >= 16 and at + 4 <= source:len() and source(at, 4):uint() == 0 then
      local last = source(at - 14, 1):bitfield(1, 1) == 1
      local opcode = source(at - 13, 1):bitfield(4, 4)
      local size = source(at - 16, 2):uint() - 18
      if last and opcode >= 3 and opcode <= 6 and size > 0 and at + 4 + size <= source:len() then
        iwarp(source(at + 4, size):tvb(), pinfo, tree)
      end
    end
  end
end

function rest.dissector(_, pinfo, tree)
  iwarp_again(pinfo, tree)
  for _, private in ipairs({ get.mpa_private() }) do
    if private.len >= 5 then cm_private(private.range:tvb(), pinfo, tree) end
  end
  for _, xid in ipairs({ get.rpcordma_xid() }) do
    local source = xid.source
    local at = source and message_of_version1(source, xid.offset)
    if at then dissect_ccp(source, at, pinfo, tree) end
  end
end
register_postdissector(rest)
