-- The beginning of every script of the schedule.
--
-- Entries are in 16 slots, by the first four bits of their operation id, so that slots in order have
-- their operation ids in order. All keys of a slot have one hash tag; none has an expiry:
--   entries     hash: member, and 'hxe1', length of the queue's name in one byte, queue, sealed note
--   order       sorted set: members, all with score 0, which is their order
--   queues      sorted set: names of queues, all with score 0
--   due:QUEUE   sorted set: members, each with the time at which it is due as its score
-- A member is the operation id and the entry id: 48 bytes.
--
-- A script that fails is not rolled back. The hash decides whether an entry exists: insertion writes it
-- last, and removal after the other keys. An insertion that fails removes the members that it added, and
-- a removal checks types first. A member that is not in the hash was left behind by a script that failed:
-- reads pass over it and remove it.
--
-- Errors have the codes of swap.lua. A reply begins with its first key or with the member, so that a
-- reply to another request is detected.
local MAGIC = 'hxe1'
-- Scores are doubles, exact up to here: microseconds until the year 2255.
local LAST = 9007199254740991

local function digits(number)
  return string.format('%.0f', math.min(number, LAST))
end

local function rejected(reply)
  local code = 'NOTWRITTEN '
  if string.find(reply.err, 'WRONGTYPE', 1, true) then
    code = 'HAPAX '
  elseif string.find(reply.err, 'READONLY', 1, true) then
    code = 'READONLY '
  end
  return redis.error_reply(code .. reply.err)
end

-- Calls a command. Returns its reply, or nil and the error.
local function call(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    return nil, rejected(reply)
  end
  return reply
end

-- Members without an entry that one call passes over. The next call finds those removed.
local MAX_MISSING = 10000

-- Removes a member without an entry. Returns whether it is removed: the server may reject writes.
local function drop(key, member)
  return redis.pcall('ZREM', key, member) == 1
end

-- Returns the queue of an entry; nil if it is damaged.
local function queue_of(value)
  local length = string.byte(value, 5)
  if string.sub(value, 1, 4) ~= MAGIC or not length or #value < 5 + length then
    return nil
  end
  return string.sub(value, 6, 5 + length)
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
